#include "weft/report.h"

#include <cmath>
#include <cstdlib>
#include <utility>
#include <vector>

#include "page_files.h"
#include "parts.h"
#include "text.h"
#include "timeline.h"

namespace weft::report {
namespace {

// Nothing of the page may load anything, whatever a string in a trace tries.
constexpr const char* kPolicy =
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:; "
    "base-uri 'none'; form-action 'none'";

void put_head(std::string& out, const Page& page) {
  out += "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n";
  out += std::string("<meta http-equiv=\"Content-Security-Policy\" content=\"") + kPolicy + "\">\n";
  out += "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n";
  out += "<meta name=\"color-scheme\" content=\"light dark\">\n";
  out += text("<meta name=\"generator\" content=\"weft %s\">\n", version());
  out += "<link rel=\"icon\" href=\"data:,\">\n";
  out += "<title>" + escaped(page.title.empty() ? "weft report" : page.title) + "</title>\n";
  out += std::string("<style>\n") + kPageStyle + "</style>\n</head>\n<body>\n";
}

// The job in a few words: "vgg16 · 4 ranks · link 25.00 Gb/s".
std::string facts_of(const Page& page) {
  std::vector<std::string> facts;
  for (const Run& run : page.runs) {
    if (run.trace == nullptr || run.trace->processes.empty()) continue;
    const trace::Process& process = run.trace->processes.front();
    if (!process.model.name.empty()) facts.push_back(process.model.name);
    facts.push_back(text("%u ranks", process.environment.ranks));
    for (const auto& [key, word] :
         {std::pair{"link_bits_per_s", "link "}, std::pair{"flow_bits_per_s", "one flow "}}) {
      const auto at = process.environment.lab.find(key);
      if (at == process.environment.lab.end()) continue;
      const double rate = std::strtod(at->second.c_str(), nullptr);
      if (std::isfinite(rate) && rate > 0) facts.push_back(word + format_rate(rate));
    }
    break;
  }
  std::string out;
  for (const std::string& fact : facts)
    out += (out.empty() ? "" : "<span aria-hidden=\"true\"> · </span>") + escaped(fact, 80);
  return out;
}

void put_header(std::string& out, const Page& page) {
  out += "<header>\n<p class=\"kicker\">weft report</p>\n";
  out += "<h1>" + escaped(page.title.empty() ? "Where the time went" : page.title) + "</h1>\n";
  const std::string facts = facts_of(page);
  if (!facts.empty()) out += "<p class=\"facts\">" + facts + "</p>\n";
  out += "<p class=\"verdict\">" + escaped(verdict_of(page), 1000) + "</p>\n</header>\n";
}

void put_timeline(std::string& out, const Timeline& timeline) {
  if (timeline.empty) return;
  out +=
      "<section id=\"timeline-section\" aria-labelledby=\"h-timeline\">\n"
      "<h2 id=\"h-timeline\">Timeline</h2>\n"
      "<p class=\"hint\">All runs start at the same moment of an iteration. Wheel zooms, drag "
      "moves, double click shows all; keys: <kbd>w</kbd> <kbd>s</kbd> zoom, <kbd>a</kbd> "
      "<kbd>d</kbd> or arrows move. A click on a rank opens its rows.</p>\n"
      "<div id=\"timeline-tools\" hidden></div>\n"
      "<div id=\"timeline\" hidden><div id=\"timeline-space\"></div>"
      "<canvas id=\"timeline-canvas\" tabindex=\"0\" role=\"img\" aria-label=\"Timeline of all "
      "ranks and lanes, measured above predicted. The tables on this page say the same in "
      "figures.\"></canvas></div>\n"
      "<ul id=\"timeline-legend\" class=\"legend\" hidden></ul>\n"
      "<noscript><p>The timeline needs JavaScript; all else on this page does not.</p>"
      "</noscript>\n<ul class=\"notes\">\n";
  for (const std::string& note : timeline.notes) out += "<li>" + escaped(note) + "</li>\n";
  out += "</ul>\n</section>\n";
}

}  // namespace

Result<std::string> html(const Page& page) {
  if (page.runs.empty()) return error(Code::invalid_argument, "a report needs at least one run");
  const Timeline timeline = timeline_of(page);
  std::string out;
  out.reserve(timeline.json.size() + (256U << 10U));
  put_head(out, page);
  put_header(out, page);
  out += "<main>\n";
  put_runs(out, page);
  put_time(out, page);
  put_findings(out, page);
  put_gains(out, page);
  put_timeline(out, timeline);
  put_plan(out, page);
  put_details(out, page);
  put_remarks(out, page);
  out += "</main>\n";
  out += text("<footer>Made by weft %s. This page holds all its data and loads nothing.</footer>\n",
              version());
  out += "<div id=\"tooltip\" role=\"status\" hidden></div>\n";
  out += "<script type=\"application/json\" id=\"weft-data\">" + timeline.json + "</script>\n";
  out += std::string("<script>\n") + kPageScript + "</script>\n</body>\n</html>\n";
  return out;
}

}  // namespace weft::report

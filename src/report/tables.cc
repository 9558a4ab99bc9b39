// Details by layer, by tensor and by lane: long, hence closed until somebody asks.
#include <algorithm>
#include <cmath>

#include "parts.h"
#include "text.h"

namespace weft::report {
namespace {

constexpr size_t kRowsMax = 2000;  // of one table

// A cell that sorts by its number.
std::string cell(const std::string& shown, double value) {
  return text("<td class=\"n\" data-v=\"%.6g\">", std::isfinite(value) ? value : 0.0) + shown +
         "</td>";
}

std::string ms_cell(double ms) { return cell(fixed(ms, 2), ms); }

void open_table(std::string& out, const std::string& title, size_t rows,
                const std::vector<const char*>& columns) {
  out += "<details><summary>" + escaped(title) + " <span class=\"soft\">" + grouped(rows) +
         "</span></summary>\n<div class=\"wide\"><table class=\"sortable\">\n<thead><tr>";
  for (size_t i = 0; i < columns.size(); ++i)
    out += std::string("<th scope=\"col\"") + (i > 0 ? " class=\"n\"" : "") + ">" + columns[i] +
           "</th>";
  out += "</tr></thead>\n<tbody>\n";
}

void close_table(std::string& out, size_t rows) {
  out += "</tbody></table></div>\n";
  if (rows > kRowsMax) out += "<p>" + grouped(rows - kRowsMax) + " rows left out.</p>\n";
  out += "</details>\n";
}

// Those that were waited for most stand first.
std::vector<const diagnose::Detail*> ranked(const std::vector<diagnose::Detail>& details) {
  std::vector<const diagnose::Detail*> out;
  out.reserve(details.size());
  for (const diagnose::Detail& detail : details) out.push_back(&detail);
  const auto weight = [](const diagnose::Detail* d) {
    const double sum = d->waited_ns + d->queued_ns * 1e-9;
    return std::isfinite(sum) ? sum : 0;
  };
  std::stable_sort(out.begin(), out.end(),
                   [&](const auto* a, const auto* b) { return weight(a) > weight(b); });
  if (out.size() > kRowsMax) out.resize(kRowsMax);
  return out;
}

void put_details_table(std::string& out, const char* title, const Run& run,
                       const std::vector<diagnose::Detail>& details, bool compute) {
  if (details.empty()) return;
  const Scale scale = scale_of(run);
  std::vector<const char*> columns = {"name", "size"};
  if (compute) columns.push_back("compute, ms");
  columns.insert(columns.end(), {"transfer, ms", "waited for, ms", "queued, ms"});
  open_table(out, title, details.size(), columns);
  for (const diagnose::Detail* detail : ranked(details)) {
    const double bytes = scale.bytes(detail->bytes);
    out += "<tr><th scope=\"row\">" + escaped(detail->name, 120) + "</th>" +
           cell(std::isfinite(bytes) ? format_size(bytes) : "unknown", bytes);
    if (compute) out += ms_cell(scale.ms(detail->compute_ns));
    out += ms_cell(scale.ms(detail->transfer_ns)) + ms_cell(scale.ms(detail->waited_ns)) +
           ms_cell(scale.ms(detail->queued_ns)) + "</tr>\n";
  }
  close_table(out, details.size());
}

void put_lanes(std::string& out, const Run& run) {
  const std::vector<diagnose::LaneUse>& lanes = run.diagnosis->lanes;
  if (lanes.empty()) return;
  const Scale scale = scale_of(run);
  open_table(out, "By lane", lanes.size(), {"lane", "rank", "rate while busy", "busy"});
  for (size_t i = 0; i < lanes.size() && i < kRowsMax; ++i) {
    const diagnose::LaneUse& lane = lanes[i];
    const double rate = scale.bits_per_s(lane.bytes_per_s);
    out += text(
               "<tr><th scope=\"row\" data-v=\"%u\">lane %u</th><td class=\"n\" data-v=\"%u\">"
               "%u</td>",
               lane.lane, lane.lane, lane.rank, lane.rank) +
           cell(std::isfinite(rate) ? format_rate(rate) : "unknown", rate) +
           cell(in_percent(lane.busy_percent), lane.busy_percent) + "</tr>\n";
  }
  close_table(out, lanes.size());
}

}  // namespace

void put_details(std::string& out, const Page& page) {
  std::string body;
  for (const Run& run : page.runs) {
    if (run.diagnosis == nullptr) continue;
    std::string tables;
    put_details_table(tables, "By layer", run, run.diagnosis->layers, true);
    put_details_table(tables, "By tensor", run, run.diagnosis->tensors, false);
    put_lanes(tables, run);
    if (!tables.empty()) body += "<h3>" + escaped(run.label) + "</h3>\n" + tables;
  }
  if (body.empty()) return;
  out += "<section aria-labelledby=\"h-details\">\n<h2 id=\"h-details\">Details</h2>\n" + body +
         "</section>\n";
}

}  // namespace weft::report

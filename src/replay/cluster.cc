#include <limits>

#include "weft/replay.h"

namespace weft::replay {

Result<void> set(Cluster& cluster, const std::string& assignment) {
  size_t equals = assignment.find('=');
  std::string key = assignment.substr(0, equals);
  const std::vector<std::string> keys = {"hosts", "link", "flow"};
  if (equals == std::string::npos)
    return error(Code::invalid_argument,
                 "\"%s\" is not of the form KEY=VALUE, such as link=10gbit or hosts=8",
                 assignment.c_str());
  std::string value = assignment.substr(equals + 1);
  if (key == "hosts") {
    char* end = nullptr;
    unsigned long hosts = std::strtoul(value.c_str(), &end, 10);
    if (value.empty() || *end != '\0' || hosts < 1 || hosts > 4096)
      return error(Code::invalid_argument, "hosts=%s: expected a number from 1 to 4096",
                   value.c_str());
    cluster.hosts = static_cast<uint32_t>(hosts);
    return {};
  }
  if (key == "flow" && value == "none") {
    cluster.flow_bits_per_s = std::numeric_limits<double>::infinity();
    return {};
  }
  if (key == "link" || key == "flow") {
    auto rate = parse_rate(value);
    if (!rate) return std::move(rate).error().in(key);
    if (!(*rate > 0))
      return error(Code::invalid_argument, "%s=%s: expected a rate above 0", key.c_str(),
                   value.c_str());
    (key == "link" ? cluster.link_bits_per_s : cluster.flow_bits_per_s) = *rate;
    return {};
  }
  auto near = nearest(key, keys);
  return error(Code::invalid_argument, "\"%s\" cannot be set; expected hosts, link or flow%s",
               key.c_str(), near ? text("; did you mean %s?", near->c_str()).c_str() : "");
}

}  // namespace weft::replay

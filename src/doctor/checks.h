// The doctor's parts. Each adds to a list what it looked at, well or not.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "weft/doctor.h"

namespace weft::doctor {

// What a check looks at, as far as it is read from files of the kernel: below `root`, so that a
// test can be another machine. Values that cannot be read are absent.
struct KernelFiles {
  std::string root;                                                // "" for the real ones
  std::optional<std::string> text(const std::string& path) const;  // first line
  std::optional<uint64_t> number(const std::string& path) const;
};

class Checks {
 public:
  void ok(std::string name, std::string found) {
    list_.push_back({std::move(name), Verdict::ok, std::move(found), ""});
  }
  void note(std::string name, std::string found, std::string remedy) {
    list_.push_back({std::move(name), Verdict::note, std::move(found), std::move(remedy)});
  }
  void problem(std::string name, std::string found, std::string remedy) {
    list_.push_back({std::move(name), Verdict::problem, std::move(found), std::move(remedy)});
  }
  std::vector<Check> take() { return std::move(list_); }
  const std::vector<Check>& list() const { return list_; }

 private:
  std::vector<Check> list_;
};

// host.cc: processors, memory, limits, clock, settings of the kernel.
void check_processors(Checks& checks, const KernelFiles& files, uint32_t ranks);
void check_memory(Checks& checks, const KernelFiles& files);
void check_shared_memory(Checks& checks, uint64_t size_bytes, uint64_t free_bytes);
void check_limits(Checks& checks, uint64_t open_files, uint64_t open_files_max,
                  uint64_t locked_bytes, uint32_t ranks);
void check_clock(Checks& checks, const KernelFiles& files);
void check_tcp_settings(Checks& checks, const KernelFiles& files);
void check_ptrace(Checks& checks, const KernelFiles& files);
void check_host(Checks& checks, const Options& options);

// network.cc: interfaces, names, routes, ports of this host.
void check_network(Checks& checks, const Options& options);

// peer.cc: what a connection carries, to this host itself and to others.
void check_loopback_rate(Checks& checks);
void check_other_host(Checks& checks, const Options& options, const std::string& host);

}  // namespace weft::doctor

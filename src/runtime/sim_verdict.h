// Whether what happened in a scene is what must happen: right results, or a culprit among those who
// are to blame on every survivor; afterwards one new group, or none.
#pragma once

#include <regex>

#include "sim_play.h"

namespace weft::runtime::simulated {

// A rank or a link that is away for less than this is not missed: a lane may take 12 s to open, and
// silence counts from 15 s on.
constexpr Nanos kNotMissed = Nanos::from_seconds(10);

// The last words of a rank that closes its connections have so long to be read.
constexpr Nanos kLastWords = Nanos::from_millis(500);
// Survivors that are held up for longer may find that the others went on.
constexpr Nanos kTakesTime = Nanos::from_seconds(1);

struct Judgement {
  std::vector<std::set<uint32_t>> suspects;  // by rank: whom it may blame
  bool harmless = true;                      // nothing that a group may fail of
  // Only processes that died, or a call to abort(): whoever is left must meet again.
  bool clean_losses = true;
};

// Whether ranks of the first group have a branch, which like the channel to the root is not opened
// again.
inline bool have_branch(const Scene& scene, std::pair<Rank, Rank> ends) {
  if (scene.fan_out == 0) return false;
  const schedule::Tree tree{scene.ranks, scene.fan_out};
  auto [lower, higher] = std::minmax(ends.first.index, ends.second.index);
  return tree.above(higher) == lower;
}

// When a world begins; faults count from there.
constexpr Nanos kWorldBegins = Nanos::from_seconds(1000);

// Whether one of two ranks left, all done, when nothing it said could reach the other any more, nor
// for longer than last words are repeated: whether all went well cannot be known there.
inline bool cuts_off_a_farewell(const Fault& fault, const Played& played) {
  for (uint32_t rank = 0; rank < played.reports.size(); ++rank) {
    if (rank != fault.rank && fault.other != sim::kEveryone && rank != fault.other) continue;
    const Chapter& last = played.reports[rank].chapters.back();
    Nanos left = last.ended - kWorldBegins;
    if (!last.error && left > fault.from - kLastWords && left < fault.until) return true;
  }
  return false;
}

// The time in which all ranks were stopped: nobody can miss anybody.
inline std::pair<Nanos, Nanos> all_stopped(const Scene& scene) {
  std::pair<Nanos, Nanos> common{Nanos{0}, sim::kForever};
  for (uint32_t rank = 0; rank < scene.ranks; ++rank) {
    std::pair<Nanos, Nanos> longest{Nanos{0}, Nanos{0}};
    for (const Fault& fault : scene.world.faults)
      if (fault.kind == Fault::Kind::stop && fault.rank == rank &&
          fault.until - fault.from > longest.second - longest.first)
        longest = {fault.from, fault.until};
    common = {std::max(common.first, longest.first), std::min(common.second, longest.second)};
  }
  return common;
}

inline Judgement judge(const Scene& scene, const Played& played) {
  Judgement out;
  out.suspects.resize(scene.ranks);
  auto touches = [&](uint32_t rank) {
    for (auto& suspects : out.suspects) suspects.insert(rank);
  };
  bool rebuilt = std::any_of(played.reports.begin(), played.reports.end(),
                             [](const Report& report) { return report.chapters.size() > 1; });
  auto [common_from, common_until] = all_stopped(scene);
  for (size_t i = 0; i < scene.world.faults.size(); ++i) {
    const Fault& fault = scene.world.faults[i];
    const auto& ends = played.ends[i];
    Nanos lasts = fault.until == sim::kForever ? sim::kForever : fault.until - fault.from;
    switch (fault.kind) {
      case Fault::Kind::spike:
      case Fault::Kind::slow:
      case Fault::Kind::task_stop:  // lanes are opened again without the worker
      case Fault::Kind::task_end:
      case Fault::Kind::refusal:
      case Fault::Kind::memory:
      case Fault::Kind::file: break;  // by who was refused something, below
      case Fault::Kind::partition:
        // Who cannot be reached for longer than words are waited for is gone without any.
        for (uint32_t rank = 0; rank < scene.ranks && lasts > kLastWords; ++rank) {
          if (fault.other != sim::kEveryone && rank != fault.other) continue;
          out.suspects[rank].insert(fault.rank);
          out.suspects[fault.rank].insert(rank);
        }
        if (lasts > kTakesTime) out.clean_losses = false;
        if (lasts > kLastWords && cuts_off_a_farewell(fault, played)) out.harmless = false;
        if (lasts <= kNotMissed) break;
        out.harmless = out.clean_losses = false;
        touches(fault.rank);
        if (fault.other != sim::kEveryone) touches(fault.other);
        // Who is cut off from everyone cannot know that it is not the others.
        for (uint32_t rank = 0; rank < scene.ranks; ++rank) out.suspects[fault.rank].insert(rank);
        break;
      case Fault::Kind::stop: {
        bool together = common_until > common_from && fault.from <= common_from &&
                        fault.until >= common_until && lasts != sim::kForever;
        if (lasts > kTakesTime) out.clean_losses = false;
        // Only rank 0 knows who is missing while a group forms: others miss its word.
        if (lasts > kLastWords && fault.rank == 0) touches(0);
        if ((together ? lasts - (common_until - common_from) : lasts) <= kNotMissed) break;
        out.harmless = out.clean_losses = false;
        touches(fault.rank);
        break;
      }
      case Fault::Kind::reset:
      case Fault::Kind::half_open:
      case Fault::Kind::corrupt:
        if (!ends) break;
        out.clean_losses = false;
        // A lane is opened again; the channel to the root and a branch are not. Who is the root of
        // a group that was rebuilt is not known here.
        if (fault.kind == Fault::Kind::reset && ends->second.index != 0 && !rebuilt &&
            !have_branch(scene, *ends))
          break;
        out.harmless = out.harmless && fault.kind == Fault::Kind::reset &&
                       ends->second.index != 0 && !have_branch(scene, *ends);
        touches(ends->first.index);
        touches(ends->second.index);
        break;
      case Fault::Kind::death:
      case Fault::Kind::power_loss: break;  // by who has died, below
    }
    if (fault.kind == Fault::Kind::power_loss) out.clean_losses = false;
  }
  for (uint32_t rank = 0; rank < scene.ranks; ++rank) {
    // What a trace is refused is no excuse for anything.
    bool refused = played.refused[rank] || played.refused_file[rank];
    if (refused) out.clean_losses = false;
    if (!played.died[rank] && !refused) continue;
    out.harmless = false;
    touches(rank);
  }
  for (const Doom& doom : scene.dooms)
    if (doom.when != Doom::When::leaving || doom.silently) out.clean_losses = false;
  for (const Act& act : scene.acts) {
    if (act.kind != Act::Kind::abort && act.kind != Act::Kind::quit) continue;
    out.harmless = false;
    touches(act.members[0]);
  }
  return out;
}

// Whether the words speak of one of the ranks: "rank 3", "ranks 1, 3 and 4".
inline bool names(const std::string& words, const std::set<uint32_t>& ranks) {
  static const std::regex kList("ranks? ((\\d+)(, \\d+)*( and \\d+)?)");
  static const std::regex kNumber("\\d+");
  for (std::sregex_iterator list(words.begin(), words.end(), kList), end; list != end; ++list) {
    std::string numbers = (*list)[1];
    for (std::sregex_iterator one(numbers.begin(), numbers.end(), kNumber); one != end; ++one)
      if (ranks.contains(static_cast<uint32_t>(std::stoul(one->str())))) return true;
  }
  return false;
}

class Verdict {
 public:
  Verdict(const Scene& scene, const Played& played)
      : scene_(scene), played_(played), judgement_(judge(scene, played)) {}

  // What is not as it must be; empty if all is well.
  std::string words() const {
    if (!played_.outcome.complete) return "it hangs: " + played_.outcome.report;
    Nanos patience = Nanos::from_seconds(180);
    for (const Fault& fault : scene_.world.faults)
      if (fault.until != sim::kForever)
        patience = std::max(patience, fault.until + Nanos::from_seconds(180));
    if (played_.outcome.took > patience) return "it took " + format_duration(played_.outcome.took);
    uint32_t epochs = 1;
    for (uint32_t rank = 0; rank < scene_.ranks; ++rank) {
      const Report& report = played_.reports[rank];
      if (!report.wrong.empty()) return text("rank %u: wrong: %s", rank, report.wrong.c_str());
      for (const Chapter& chapter : report.chapters) {
        epochs = std::max(epochs, chapter.epoch + 1);
        if (&chapter != &report.chapters[0] && chapter.members.empty() && judgement_.harmless)
          return text("rank %u: failed of something harmless: %s", rank,
                      chapter.error->message().c_str());
      }
    }
    for (uint32_t epoch = 0; epoch < epochs; ++epoch)
      if (std::string problem = of_group(epoch); !problem.empty())
        return text("group %u: ", epoch) + problem;
    if (std::string problem = of_files(); !problem.empty()) return problem;
    return all_met_again();
  }

 private:
  // A trace is whole, or it is said why not; a file that ranks meet by is not left behind.
  std::string of_files() const {
    for (uint32_t rank = 0; scene_.traced && rank < scene_.ranks; ++rank) {
      const Recording& recording = played_.reports[rank].recording;
      if (played_.outcome.died[rank]) {
        if (recording.whole && !recording.over)
          return text("rank %u died, and its trace looks whole", rank);
        continue;
      }
      if (!recording.over) return text("rank %u did not end its trace", rank);
      if (recording.error && recording.refused == 0 && !played_.refused[rank])
        return text("rank %u: its trace failed of nothing: %s", rank,
                    recording.error->message().c_str());
      if (recording.refused > 0 && !recording.error)
        return text("rank %u was not told why its trace failed", rank);
      if (recording.refused > 0 && recording.error->code() == Code::io &&
          recording.error->message().find(played_.folder) == std::string::npos)
        return text("rank %u is not told which file: %s", rank, recording.error->message().c_str());
      if (recording.error) continue;
      if (!recording.readable || !recording.whole)
        return text("rank %u: its trace is not whole, and nobody said so", rank);
      if (recording.dropped != recording.told_dropped)
        return text("rank %u: its trace tells of %llu dropped records, and it were %llu", rank,
                    static_cast<unsigned long long>(recording.told_dropped),
                    static_cast<unsigned long long>(recording.dropped));
    }
    bool may_stay = played_.outcome.died[0];
    for (Files::Call call : played_.reports[0].refused_joining)
      may_stay = may_stay || call == Files::Call::unlink || call == Files::Call::status;
    if (!played_.left.empty() && !may_stay) return "it leaves behind " + played_.left[0];
    return {};
  }

  bool gone(uint32_t rank) const {
    return played_.outcome.died[rank] || played_.reports[rank].quit;
  }
  bool was_stopped(uint32_t rank) const {
    return std::any_of(scene_.world.faults.begin(), scene_.world.faults.end(), [&](const Fault& f) {
      return f.kind == Fault::Kind::stop && f.rank == rank && f.until - f.from > kLastWords;
    });
  }
  // What a rank has to say of the group of that epoch, if it was in it; of the first one also if it
  // did not get there. Some are in groups that others never saw: those that failed at once.
  const Chapter* of(uint32_t rank, uint32_t epoch) const {
    const auto& chapters = played_.reports[rank].chapters;
    if (epoch == 0) return chapters.empty() ? nullptr : &chapters[0];
    for (const Chapter& chapter : chapters)
      if (chapter.epoch == epoch && !chapter.members.empty()) return &chapter;
    return nullptr;
  }
  // The group that it was in before.
  const Chapter& before(uint32_t rank, uint32_t epoch) const {
    const Chapter* out = &played_.reports[rank].chapters[0];
    for (const Chapter& chapter : played_.reports[rank].chapters)
      if (chapter.epoch < epoch && !chapter.members.empty()) out = &chapter;
    return *out;
  }

  std::string of_group(uint32_t epoch) const {
    size_t failed = 0, well = 0, least_done = SIZE_MAX, most_done = 0;
    const std::vector<uint32_t>* members = nullptr;
    for (uint32_t rank = 0; rank < scene_.ranks; ++rank) {
      const Chapter* chapter = of(rank, epoch);
      if (chapter == nullptr) continue;
      bool formed = !chapter->members.empty();
      if (formed && members != nullptr && *members != chapter->members)
        return text("rank %u is in another one", rank);
      if (formed) members = &chapter->members;
      if (formed && epoch > 0) {
        // More than half of the one before it, each time that it was begun.
        const Chapter& old = before(rank, epoch);
        if (chapter->members.size() << (epoch - old.epoch) <= old.members.size())
          return text("%zu ranks of %zu are not enough", chapter->members.size(),
                      old.members.size());
      }
      if (gone(rank)) continue;
      most_done = std::max(most_done, chapter->acts_done);
      if (!chapter->error) {
        ++well;
        continue;
      }
      ++failed;
      least_done = std::min(least_done, chapter->acts_done);
      if (std::string problem = of_error(rank, epoch); !problem.empty())
        return problem + text("rank %u: %s", rank, chapter->error->message().c_str());
    }
    // Some may be through when it happens to the others, but then all the work was done.
    if (epoch == 0 && failed > 0 && well > 0 && least_done < scene_.acts.size())
      return text("%zu ranks failed, and %zu did not notice", failed, well);
    return {};
  }

  std::string of_error(uint32_t rank, uint32_t epoch) const {
    const Chapter& chapter = *of(rank, epoch);
    bool formed = !chapter.members.empty();
    if (judgement_.harmless) return "failed of something harmless: ";
    std::set<uint32_t> suspects = judgement_.suspects[rank];
    // Who did not come to a new group is missed there, whatever kept it.
    if (epoch > 0)
      for (uint32_t other : chapter.members)
        if (!of(other, epoch) || of(other, epoch)->members != chapter.members)
          suspects.insert(other);
    // The file that it looks for may have come and gone while it was stopped.
    if (!formed && epoch == 0 && scene_.by_file && was_stopped(rank)) suspects.insert(0);
    // A call that only this rank makes, and for which it had no memory, ends no group.
    Code code = chapter.error->code();
    if (formed && !chapter.culprit && played_.refused[rank] && code == Code::exhausted) return {};
    if (formed && !chapter.culprit) return "blames nobody: ";
    if (formed && !suspects.contains(*chapter.culprit))
      return text("blames rank %u: ", *chapter.culprit);
    // Of its files it says which, and what they met.
    bool of_file = played_.refused_file[rank] && !played_.refused[rank] && code == Code::io;
    if (of_file && !formed && chapter.error->message().find(played_.folder) == std::string::npos)
      return "does not say which file: ";
    // What it lacks is its own: it needs no name for itself.
    bool own = code == Code::io || code == Code::exhausted ||
               chapter.error->message() == "no memory left";  // for better words
    if ((played_.refused[rank] || played_.refused_file[rank]) && own) return {};
    if (epoch == 0 && !names(chapter.error->message(), suspects)) return "names nobody: ";
    return {};
  }

  // Processes died, the others know it, and they are enough: there must be a new group of them, in
  // which all is well. The one that is blamed may live, and is not waited for.
  std::string all_met_again() const {
    if (!judgement_.clean_losses) return {};
    std::set<uint32_t> left, blamed;
    Nanos first = sim::kForever, last{0};
    for (uint32_t rank = 0; rank < scene_.ranks; ++rank) {
      if (gone(rank)) continue;
      const auto& chapters = played_.reports[rank].chapters;
      if (chapters.size() < 2) return {};  // it never joined, or was through
      const Chapter* again = &chapters[1];
      left.insert(rank);
      if (auto culprit = chapters[0].culprit) blamed.insert(*culprit);
      first = std::min(first, again->began);
      last = std::max(last, again->began);
    }
    for (uint32_t rank : blamed) left.erase(rank);
    if (2 * left.size() <= scene_.ranks || last - first > Nanos::from_seconds(3)) return {};
    for (const auto& died : played_.died)
      if (died && *died > first) return {};
    for (uint32_t rank : left) {
      const Chapter& again = played_.reports[rank].chapters[1];
      if (again.error)
        return text("rank %u: no new group: %s", rank, again.error->message().c_str());
      for (uint32_t other : left)
        if (std::count(again.members.begin(), again.members.end(), other) == 0)
          return text("rank %u: rank %u is not in the new group", rank, other);
    }
    return {};
  }

  const Scene& scene_;
  const Played& played_;
  Judgement judgement_;
};

// What every rank has to say, for one who looks into a seed.
inline std::string told(const Played& played) {
  std::string out;
  for (size_t rank = 0; rank < played.reports.size(); ++rank)
    for (const Chapter& chapter : played.reports[rank].chapters) {
      out += text("rank %zu%s, %.6f s to %.6f s, %zu acts; members", rank,
                  played.outcome.died[rank] ? " (died)" : "", chapter.began.seconds() - 1000,
                  chapter.ended.seconds() - 1000, chapter.acts_done);
      for (uint32_t member : chapter.members) out += text(" %u", member);
      if (chapter.culprit) out += text("; blames %u", *chapter.culprit);
      out += "; " + (chapter.error ? chapter.error->message() : std::string("well")) + "\n";
    }
  return out;
}

inline std::string verdict(const Scene& scene, const Played& played) {
  return Verdict(scene, played).words();
}

}  // namespace weft::runtime::simulated

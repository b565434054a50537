// What the streams of the made-up device are ordered by, and what touches memory out of order.
//
// Each stream has a vector clock: for every stream, how much of its work comes before what is queued next. A mark takes the
// clock along, who waits for the mark joins it, and so does the host, behind which everything comes that it queues later.
// Two accesses to the same bytes of which one writes, on streams that do not come one behind the other, are an offence,
// however early or late they happen to be. The host is one clock, whatever its threads: what one of them has waited for
// counts for all. What the host itself reads and writes is seen where somebody tells: files do (late.py).
#pragma once
#include <algorithm>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

namespace late {

// What has been done that a real device would answer with silent corruption; a test that finds one fails.
inline std::mutex offences_lock;
inline std::vector<std::string> offences;
inline void accuse(const std::string& what) {
  constexpr size_t kMost = 20;
  std::lock_guard<std::mutex> guard(offences_lock);
  if (offences.size() < kMost) offences.push_back(what);
}

using Clock = std::vector<uint64_t>;
inline std::mutex order_lock;  // of all clocks and accesses
inline Clock host_clock;

inline void join(Clock& clock, const Clock& other) {
  if (clock.size() < other.size()) clock.resize(other.size());
  for (size_t i = 0; i < other.size(); i++) clock[i] = std::max(clock[i], other[i]);
}
inline uint64_t at(const Clock& clock, size_t i) { return i < clock.size() ? clock[i] : 0; }
inline void host_learns(const Clock& clock) {
  std::lock_guard<std::mutex> guard(order_lock);
  join(host_clock, clock);
}

// A stream's place among the others.
struct Ordered {
  size_t index;
  Clock clock;
};

struct Access {
  const char *begin, *end;
  size_t stream;
  uint64_t tick;
  bool writes;
  std::string by;
};

// What has touched a piece of memory and may still have to be waited for.
class Accesses {
 public:
  void note(Ordered& stream, const char* begin, const char* end, bool writes, const std::string& by) {
    std::lock_guard<std::mutex> guard(order_lock);
    auto& clock = stream.clock;
    join(clock, host_clock);
    if (clock.size() <= stream.index) clock.resize(stream.index + 1);
    uint64_t tick = ++clock[stream.index];
    auto is_over = [&](const Access& earlier) {
      if (earlier.end <= begin || end <= earlier.begin) return false;
      if ((writes || earlier.writes) && at(clock, earlier.stream) < earlier.tick)
        accuse(told(by, stream.index, writes) + " does not wait for " + told(earlier.by, earlier.stream, earlier.writes));
      bool covered = begin <= earlier.begin && earlier.end <= end;
      return covered && (writes || (!earlier.writes && earlier.stream == stream.index));
    };
    list_.erase(std::remove_if(list_.begin(), list_.end(), is_over), list_.end());
    list_.push_back({begin, end, stream.index, tick, writes, by});
  }

  // The host itself reads or writes: what was queued has to be known to be done. Whatever is queued later comes behind.
  void note_host(const char* begin, const char* end, bool writes) {
    std::lock_guard<std::mutex> guard(order_lock);
    for (auto& earlier : list_)
      if (begin < earlier.end && earlier.begin < end && (writes || earlier.writes) && at(host_clock, earlier.stream) < earlier.tick)
        accuse(std::string("the host ") + (writes ? "writes" : "reads") + " and does not wait for " +
               told(earlier.by, earlier.stream, earlier.writes));
  }

  // The memory is freed in the order of `owner`, and of the streams in `recorded`.
  template <class Recorded>
  void end(Ordered& owner, const Recorded& is_recorded) {
    std::lock_guard<std::mutex> guard(order_lock);
    join(owner.clock, host_clock);
    for (auto& earlier : list_)
      if (at(owner.clock, earlier.stream) < earlier.tick && earlier.stream != owner.index && !is_recorded(earlier.stream))
        accuse("memory of stream " + std::to_string(owner.index) + " was freed while in use by " +
               told(earlier.by, earlier.stream, earlier.writes));
    list_.clear();
  }

 private:
  static std::string told(const std::string& by, size_t stream, bool writes) {
    return by + " (stream " + std::to_string(stream) + (writes ? ", writes)" : ", reads)");
  }
  std::vector<Access> list_;
};

}  // namespace late

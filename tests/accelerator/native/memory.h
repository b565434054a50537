// Memory of the made-up device, and host memory that it copies from.
//
// Device memory is a file in memory that is mapped twice: where the host is told it lies, no access is allowed, so that a
// host that touches it dies; the threads of streams read and write the other mapping.
#pragma once
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Stream.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <set>
#include <unordered_map>

#include "streams.h"

namespace late {

inline const size_t kBytes = size_t(setting("LATE_GIB", 8)) << 30;  // of each device; pages are taken when touched
constexpr int kPoison = 0xFF;                                       // NaN in every dtype of numbers with a point
inline std::atomic<long> num_poisoned{0};

// --- the device's own -------------------------------------------------------------------------------------------------

struct Block {
  char* address;
  size_t size;
  DeviceIndex device;
  int64_t stream;                     // it was allocated on
  std::set<int64_t> other_streams;    // record_stream
  std::vector<MarkPointer> pending;   // of other streams, once it is freed
  Accesses accesses;
};

// What was allocated (0), freed (1) or used on another stream (2), in order, while somebody takes notes of it.
struct Note {
  int what;
  uint64_t address;
  size_t num_bytes;
  int64_t stream;
};
inline std::vector<Note> notes;
inline std::atomic<bool> takes_notes{false};
inline void note_block(int what, const Block* block, size_t num_bytes, int64_t stream) {
  if (takes_notes && block->device == 0) notes.push_back({what, (uint64_t)block->address, num_bytes, stream});
}

struct Heap {
  std::mutex lock;
  char *base = nullptr, *shadow = nullptr;
  size_t top = 0, in_use = 0, peak = 0, limit = kBytes;
  std::map<std::pair<int64_t, size_t>, std::vector<Block*>> free_blocks;
  std::vector<Block*> waiting;

  void open() {
    int file = memfd_create("late", 0);
    TORCH_CHECK(file >= 0 && ftruncate(file, kBytes) == 0, "late: no memory file");
    base = (char*)mmap(nullptr, kBytes, PROT_NONE, MAP_SHARED | MAP_NORESERVE, file, 0);
    shadow = (char*)mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0);
    TORCH_CHECK(base != MAP_FAILED && shadow != MAP_FAILED, "late: cannot map the memory file");
    close(file);
  }
  bool holds(const void* p) const { return p >= base && p < base + kBytes; }
  char* seen_by_streams(const void* p) const { return shadow + ((const char*)p - base); }

  // The earliest that the order of its stream lets somebody else write there.
  void poison(Block* block) {
    char* at = seen_by_streams(block->address);
    size_t size = block->size;
    queues(block->device)[block->stream]->push(Kind::order, [at, size] { memset(at, kPoison, size); });
    num_poisoned++;
  }
  void reuse(Block* block) {
    block->pending.clear();
    poison(block);
    free_blocks[{block->stream, block->size}].push_back(block);
  }
  void collect() {
    auto done = [](Block* block) {
      return std::all_of(block->pending.begin(), block->pending.end(), [](auto& mark) { return mark->passed(); });
    };
    auto kept = std::partition(waiting.begin(), waiting.end(), [&](Block* block) { return !done(block); });
    std::for_each(kept, waiting.end(), [&](Block* block) { reuse(block); });
    waiting.erase(kept, waiting.end());
  }
};

inline std::vector<Heap>& heaps() {
  static auto* all = [] {
    auto* made = new std::vector<Heap>(kDevices);
    for (auto& heap : *made) heap.open();
    return made;
  }();
  return *all;
}
inline char* seen_by_streams(const void* p) {
  for (auto& heap : heaps())
    if (heap.holds(p)) return heap.seen_by_streams(p);
  TORCH_CHECK(!p, "late: not an address of a device");
  return nullptr;
}

inline void free_block(void* context) {
  auto* block = static_cast<Block*>(context);
  auto& heap = heaps()[block->device];
  std::lock_guard<std::mutex> guard(heap.lock);
  heap.in_use -= block->size;
  note_block(1, block, block->size, block->stream);
  auto is_recorded = [&](size_t stream) { return block->other_streams.count(int64_t(stream) - block->device * (kPool + 1)) != 0; };
  block->accesses.end(queues(block->device)[block->stream]->order, is_recorded);
  block->other_streams.erase(block->stream);
  if (block->other_streams.empty()) return heap.reuse(block);
  for (auto stream : block->other_streams) block->pending.push_back(mark(*queues(block->device)[stream]));
  block->other_streams.clear();
  heap.waiting.push_back(block);
}
inline void free_nothing(void*) {}

class DeviceMemory final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t num_bytes) override {
    auto device = current_device;
    auto& heap = heaps()[device];
    if (!num_bytes) return {nullptr, nullptr, &free_nothing, Device(kType, device)};
    health(device).check();
    bool refused = health(device).refused_allocation.strikes();
    std::lock_guard<std::mutex> guard(heap.lock);
    heap.collect();
    Block* block = refused ? nullptr : take(heap, device, rounded(num_bytes));
    TORCH_CHECK_WITH(OutOfMemoryError, block, "late out of memory: tried to allocate ", num_bytes, " bytes; ",
                     heap.in_use, " of ", heap.limit, " are in use");
    note_block(0, block, num_bytes, block->stream);
    heap.in_use += block->size;
    heap.peak = std::max(heap.peak, heap.in_use);
    auto& owner = queues(device)[block->stream]->order;
    block->accesses.note(owner, block->address, block->address + block->size, true, "allocation");
    return {block->address, block, &free_block, Device(kType, device)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t num_bytes) const override {
    for (int d = 0; d < kDevices; d++) synchronize(d);
    memcpy(seen_by_streams(to), seen_by_streams(from), num_bytes);
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t = {0, 0}) override {}
  void recordStream(const c10::DataPtr& p, c10::Stream stream) override {
    if (!p.get()) return;
    TORCH_CHECK(p.get_deleter() == &free_block, "late: record_stream of memory that the device did not allocate");
    auto* block = static_cast<Block*>(p.get_context());
    std::lock_guard<std::mutex> guard(heaps()[block->device].lock);
    note_block(2, block, block->size, stream.id());
    if (stream.device_index() == block->device) block->other_streams.insert(stream.id());
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex device) override {
    c10::CachingDeviceAllocator::DeviceStats found;
    auto& heap = heaps()[device];
    std::lock_guard<std::mutex> guard(heap.lock);
    auto put = [](c10::CachingAllocator::StatArray& stat, int64_t now, int64_t peak) {
      stat[0].current = now, stat[0].peak = peak;
    };
    put(found.allocated_bytes, heap.in_use, heap.peak);
    put(found.active_bytes, heap.in_use, heap.peak);
    put(found.reserved_bytes, heap.top, heap.top);
    return found;
  }
  void resetAccumulatedStats(DeviceIndex) override {}
  void resetPeakStats(DeviceIndex device) override {
    auto& heap = heaps()[device];
    std::lock_guard<std::mutex> guard(heap.lock);
    heap.peak = heap.in_use;
  }
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex device) override {
    auto& heap = heaps()[device];
    health(device).check();
    std::lock_guard<std::mutex> guard(heap.lock);
    return {heap.limit - std::min(heap.limit, heap.in_use), heap.limit};
  }

 private:
  static size_t rounded(size_t num_bytes) {
    size_t quantum = num_bytes > (1 << 20) ? 1 << 18 : 512;
    return (num_bytes + quantum - 1) / quantum * quantum;
  }
  // Return a block that nobody uses, of exactly `size`; null where the limit forbids one.
  static Block* take(Heap& heap, DeviceIndex device, size_t size) {
    auto stream = current_stream[device];
    if (heap.in_use + size > heap.limit) return nullptr;
    auto& left = heap.free_blocks[{stream, size}];
    if (!left.empty()) {
      auto* block = left.back();
      left.pop_back();
      return block;
    }
    if (heap.top + size > kBytes) return nullptr;
    auto* block = new Block{heap.base + heap.top, size, device, stream, {}, {}};
    heap.top += size;
    heap.poison(block);
    return block;
  }
};
inline DeviceMemory device_memory;

// --- pinned host memory -----------------------------------------------------------------------------------------------

struct Range {
  size_t size;
  std::vector<MarkPointer> copies;  // that may be in flight
  Accesses accesses;                // of streams
  bool in_flight() const {
    return std::any_of(copies.begin(), copies.end(), [](auto& mark) { return !mark->passed(); });
  }
};

// Registered ranges and those of torch's allocator of pinned memory.
class PinnedMemory final : public at::Allocator {
 public:
  // 0, or the code of an error as a driver's: 2 where it pins no more, 712 where part of the range is registered already,
  // 713 where none is.
  int register_range(uintptr_t address, size_t size) {
    if (rate_ > 0) std::this_thread::sleep_for(std::chrono::duration<double>(size / rate_));
    std::lock_guard<std::mutex> guard(lock_);
    if (pinned_ + size > limit_) return 2;
    auto* start = (char*)address;
    auto after = ranges_.lower_bound(start + size);
    if (after != ranges_.begin() && std::prev(after)->first + std::prev(after)->second.size > start) return 712;
    ranges_[start] = {size, {}, {}};
    pinned_ += size;
    return 0;
  }
  int unregister_range(uintptr_t address) {
    std::lock_guard<std::mutex> guard(lock_);
    auto found = ranges_.find((char*)address);
    if (found == ranges_.end()) return 713;
    if (found->second.in_flight()) accuse("memory was unpinned while a copy was in flight");
    pinned_ -= found->second.size;
    ranges_.erase(found);
    return 0;
  }
  // What the driver pins at most, 0 for all, and bytes of it a second, 0 for at once.
  void set_pinning(size_t limit, double bytes_per_s) {
    std::lock_guard<std::mutex> guard(lock_);
    limit_ = limit ? limit : SIZE_MAX, rate_ = bytes_per_s;
  }
  size_t registered() {
    std::lock_guard<std::mutex> guard(lock_);
    return pinned_;
  }
  bool holds(const void* p) {
    std::lock_guard<std::mutex> guard(lock_);
    return find(p) != ranges_.end();
  }
  void note_copy(const void* p, MarkPointer mark) {
    std::lock_guard<std::mutex> guard(lock_);
    auto found = find(p);
    if (found == ranges_.end()) return;
    auto& copies = found->second.copies;
    if (copies.size() > 64)
      copies.erase(std::remove_if(copies.begin(), copies.end(), [](auto& m) { return m->passed(); }), copies.end());
    copies.push_back(mark);
  }
  void note_access(Ordered& stream, const char* begin, size_t num_bytes, bool writes) {
    std::lock_guard<std::mutex> guard(lock_);
    auto found = find(begin);
    if (found != ranges_.end()) found->second.accesses.note(stream, begin, begin + num_bytes, writes, "a copy of host memory");
  }
  void note_host(const char* begin, size_t num_bytes, bool writes) {
    std::lock_guard<std::mutex> guard(lock_);
    auto found = find(begin);
    if (found != ranges_.end()) found->second.accesses.note_host(begin, begin + num_bytes, writes);
  }
  size_t held() {
    std::lock_guard<std::mutex> guard(lock_);
    return held_;
  }

  c10::DataPtr allocate(size_t num_bytes) override {
    size_t size = 4096;
    while (size < num_bytes) size *= 2;
    std::lock_guard<std::mutex> guard(lock_);
    for (auto& [address, range] : waiting_)
      if (!range.in_flight()) {
        memset(address, kPoison, range.size);
        free_[range.size].push_back(address);
        range.size = 0;
      }
    waiting_.erase(std::remove_if(waiting_.begin(), waiting_.end(), [](auto& each) { return !each.second.size; }),
                   waiting_.end());
    auto& left = free_[size];
    char* address = nullptr;
    if (left.empty()) {
      if (pinned_ + size > limit_) throw c10::AcceleratorError({__func__, __FILE__, __LINE__}, 2, "late: out of memory to pin");
      address = (char*)aligned_alloc(4096, size);
      TORCH_CHECK(address, "late: no host memory");
      held_ += size, pinned_ += size;
    } else {
      address = left.back();
      left.pop_back();
    }
    ranges_[address] = {size, {}, {}};
    return {address, address, &give_back, Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &give_back; }
  void copy_data(void* to, const void* from, size_t num_bytes) const override { memcpy(to, from, num_bytes); }

 private:
  static void give_back(void* context);
  std::map<char*, Range>::iterator find(const void* p) {
    auto after = ranges_.upper_bound((char*)p);
    if (after == ranges_.begin()) return ranges_.end();
    auto before = std::prev(after);
    return (char*)p < before->first + before->second.size ? before : ranges_.end();
  }
  std::mutex lock_;
  std::map<char*, Range> ranges_;
  std::map<size_t, std::vector<char*>> free_;
  std::vector<std::pair<char*, Range>> waiting_;  // freed, and perhaps still copied from
  size_t held_ = 0;
  size_t pinned_ = 0, limit_ = SIZE_MAX;  // by the driver, for whomever
  std::atomic<double> rate_{0};
};
inline PinnedMemory pinned_memory;

inline void PinnedMemory::give_back(void* context) {
  std::lock_guard<std::mutex> guard(pinned_memory.lock_);
  auto found = pinned_memory.ranges_.find((char*)context);
  if (found == pinned_memory.ranges_.end()) return;
  pinned_memory.waiting_.emplace_back(*found);
  pinned_memory.ranges_.erase(found);
}

}  // namespace late

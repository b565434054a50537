// "late": a made-up accelerator for torch, on the PrivateUse1 key, for tests where there is no GPU. See docs/testing.md.
#include <ATen/autocast_mode.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <torch/csrc/utils/pybind.h>

#include "operators.h"

namespace late {

using c10::Stream;

struct Event {
  MarkPointer last;
};

class Guard final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override { return kType; }
  Device getDevice() const override { return Device(kType, current_device); }
  void setDevice(Device device) const override {
    TORCH_CHECK(device.index() < kDevices, "late: invalid device ordinal ", int(device.index()));
    uncheckedSetDevice(device);
  }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.index() >= 0) current_device = device.index();
  }
  Device exchangeDevice(Device device) const override {
    auto before = getDevice();
    setDevice(device);
    return before;
  }
  DeviceIndex deviceCount() const noexcept override { return DeviceIndex(kDevices); }
  c10::DeviceCapability getDeviceCapability(Device) const override { return c10::DeviceCapability(); }

  Stream getStream(Device device) const override { return stream(device, current_stream[index_of(device)]); }
  Stream getDefaultStream(Device device) const override { return stream(device, 0); }
  Stream getStreamFromGlobalPool(Device device, bool) const override { return getNewStream(device, 0); }
  Stream getNewStream(Device device, int) const override {
    static std::atomic<int64_t> next{0};
    return stream(device, 1 + next++ % kPool);
  }
  Stream exchangeStream(Stream other) const override {
    auto before = getStream(other.device());
    current_stream[other.device_index()] = other.id();
    return before;
  }
  void* getStreamNativeHandle(const Stream s) const override { return &queue(s); }
  bool queryStream(const Stream& s) const override {
    health(s.device_index()).check();
    return queue(s).empty();
  }
  void synchronizeStream(const Stream& s) const override {
    note_wait(queue(s), "a stream");
    queue(s).synchronize();
    health(s.device_index()).check();
  }
  void synchronizeDevice(const DeviceIndex device) const override {
    if (watcher) tell_watcher("a device");
    synchronize(device < 0 ? current_device : device);
  }

  void record(void** event, const Stream& s, const DeviceIndex device, const c10::EventFlag) const override {
    TORCH_CHECK(device == -1 || device == s.device_index(), "late: an event of device ", int(device),
                " cannot be recorded on a stream of device ", int(s.device_index()));
    health(s.device_index()).check();
    if (!*event) *event = new Event;
    static_cast<Event*>(*event)->last = mark(queue(s));
  }
  void block(void* event, const Stream& s) const override {
    if (auto last = last_of(event)) wait_for(queue(s), last);
  }
  bool queryEvent(void* event) const override {
    auto last = last_of(event);
    bool passed = !last || last->passed();
    if (last && passed) host_learns(last->clock);
    return passed;
  }
  void synchronizeEvent(void* event) const override {
    auto last = last_of(event);
    if (!last) return;
    {
      WithoutGil nogil;
      last->wait();
    }
    host_learns(last->clock);
    for (int d = 0; d < kDevices; d++) health(DeviceIndex(d)).check();
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  double elapsedTime(void* begin, void* end, const DeviceIndex) const override {
    TORCH_CHECK(last_of(begin) && last_of(end), "late: the time between events that were never recorded");
    TORCH_CHECK(queryEvent(begin) && queryEvent(end), "late: the time between events that have not passed");
    return last_of(end)->at_ms() - last_of(begin)->at_ms();
  }
  void recordDataPtrOnStream(const c10::DataPtr& p, const Stream& s) const override { device_memory.recordStream(p, s); }

 private:
  static Stream stream(Device device, int64_t number) {
    return Stream(Stream::UNSAFE, Device(kType, index_of(device)), number);
  }
  static Queue& queue(const Stream& s) { return *queues(s.device_index())[s.id()]; }
  static MarkPointer last_of(void* event) { return event ? static_cast<Event*>(event)->last : nullptr; }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)
REGISTER_ALLOCATOR(kType, &device_memory)

class Hooks final : public at::PrivateUse1HooksInterface {
 public:
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  const at::Generator& getDefaultGenerator(DeviceIndex device) const override { return generator(device); }
  at::Generator getNewGenerator(DeviceIndex device) const override {
    return at::make_generator<Generator>(device < 0 ? current_device : device);
  }
  Device getDeviceFromPtr(void* p) const override {
    for (int d = 0; d < kDevices; d++)
      if (heaps()[d].holds(p)) return Device(kType, DeviceIndex(d));
    TORCH_CHECK(false, "late: not an address of a device");
  }
  bool isPinnedPtr(const void* p) const override { return pinned_memory.holds(p); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t n) const override { resize_storage(storage, n); }
  DeviceIndex deviceCount() const override { return DeviceIndex(kDevices); }
  DeviceIndex getCurrentDevice() const override { return current_device; }
  void setCurrentDevice(DeviceIndex device) const override { Guard().setDevice(Device(kType, device)); }
  DeviceIndex exchangeDevice(DeviceIndex device) const override {
    auto before = current_device;
    if (device >= 0) setCurrentDevice(device);
    return before;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override { return exchangeDevice(device); }
};
static Hooks hooks;

static Countdown& countdown(DeviceIndex device, const std::string& what) {
  auto& state = health(device);
  if (what == "kernel") return state.failing_kernel;
  if (what == "loss") return state.loss;
  TORCH_CHECK(what == "allocation", "late: no fault called ", what);
  return state.refused_allocation;
}
// Streams that a test holds up, until it lets all of them go: lateness that leaves nothing to chance.
static std::vector<MarkPointer> gates;
static void hold_up(DeviceIndex device, int64_t stream) {
  gates.push_back(std::make_shared<Mark>());
  wait_for(*queues(device)[stream], gates.back());
}
static void let_go() {
  for (auto& gate : gates) gate->pass();
  gates.clear();
}
static bool heal(DeviceIndex device) {
  bool was_broken = health(device).broken;
  for (auto* queue : queues(device)) queue->synchronize();
  health(device).heal();
  return was_broken;
}
static std::vector<std::string> take_offences() {
  std::lock_guard<std::mutex> guard(offences_lock);
  std::vector<std::string> found;
  found.swap(offences);
  return found;
}
static void set_limit(DeviceIndex device, size_t num_bytes) {
  auto& heap = heaps()[device];
  std::lock_guard<std::mutex> guard(heap.lock);
  heap.limit = num_bytes ? std::min(num_bytes, kBytes) : kBytes;
}
static std::map<std::string, size_t> memory(DeviceIndex device) {
  auto& heap = heaps()[device];
  std::lock_guard<std::mutex> guard(heap.lock);
  return {{"allocated", heap.in_use}, {"peak", heap.peak}, {"reserved", heap.top}};
}
static std::map<std::string, long> statistics() {
  return {{"kernels", num_kernels}, {"waited", num_waited}, {"copies", num_copies}, {"poisoned", num_poisoned}};
}

}  // namespace late

namespace at::autocast {
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
#define LOWER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
  AT_FORALL_LOWER_PRECISION_FP(LOWER)
#define HIGHER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
  AT_FORALL_FP32(HIGHER)
#define PROMOTED(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
  AT_FORALL_PROMOTE(PROMOTED)
}
}  // namespace at::autocast

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace late;
  at::RegisterPrivateUse1HooksInterface(&hooks);
  m.def("device_count", [] { return kDevices; });
  m.def("current_device", [] { return int(current_device); });
  m.def("set_device", [](int device) { Guard().setDevice(Device(kType, DeviceIndex(device))); });
  m.def("synchronize", [](int device) { synchronize(DeviceIndex(device)); });
  m.def("generator", [](int device) { return generator(DeviceIndex(device)); });
  m.def("register", [](uintptr_t address, size_t size) {
    WithoutGil nogil;
    return pinned_memory.register_range(address, size);
  });
  m.def("unregister", [](uintptr_t address) { return pinned_memory.unregister_range(address); });
  auto note_host = [](pybind11::buffer memory, bool writes) {
    auto bytes = memory.request();
    pinned_memory.note_host(static_cast<const char*>(bytes.ptr), bytes.size * bytes.itemsize, writes);
  };
  m.def("note_host", note_host, pybind11::arg("memory"), pybind11::arg("writes"));
  m.def("mem_get_info", [](int device) { return device_memory.getMemoryInfo(DeviceIndex(device)); });
  m.def("memory", [](int device) { return memory(DeviceIndex(device)); });
  m.def("reset_peak", [](int device) { device_memory.resetPeakStats(DeviceIndex(device)); });
  m.def("set_limit", [](int device, size_t num_bytes) { set_limit(DeviceIndex(device), num_bytes); });
  m.def("set_lateness", [](long copy_us, long kernel_us, long odds, long seed) { lateness.set(copy_us, kernel_us, odds, seed); });
  m.def("set_launch_us", [](long us) { launch_us = us; });
  m.def("set_pinning", [](size_t limit, double bytes_per_s) { pinned_memory.set_pinning(limit, bytes_per_s); });
  m.def("pinned_bytes", [] { return pinned_memory.registered(); });
  m.def("pinned_by_torch", [] { return pinned_memory.held(); });
  m.def("watch", [](pybind11::object asked) { watcher = asked.is_none() ? nullptr : asked.release().ptr(); });
  m.def("strike", [](int device, std::string what, long after) { countdown(DeviceIndex(device), what).left = after; });
  m.def("hold_up", [](int device, int64_t stream) { hold_up(DeviceIndex(device), stream); });
  m.def("let_go", let_go);
  m.def("heal", [](int device) { return heal(DeviceIndex(device)); });
  m.def("take_offences", take_offences);
  m.def("take_notes", [](bool on) {
    std::lock_guard<std::mutex> guard(heaps()[0].lock);
    takes_notes = on;
    std::vector<std::tuple<int, uint64_t, size_t, int64_t>> taken;
    for (auto& note : notes) taken.emplace_back(note.what, note.address, note.num_bytes, note.stream);
    notes.clear();
    return taken;
  });
  m.def("statistics", statistics);
}

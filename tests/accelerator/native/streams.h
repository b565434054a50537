// Streams of the made-up device: threads that take tasks in order and begin some of them late on purpose.
//
// Also what can go wrong with a device as a whole: a kernel that fails, a device that is lost, memory that runs out, each
// planned by a test as "the n-th from now".
#pragma once
#include <Python.h>
#include <c10/core/Device.h>
#include <c10/util/Exception.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "order.h"

namespace late {

using c10::Device;
using c10::DeviceIndex;
constexpr auto kType = c10::DeviceType::PrivateUse1;

inline long setting(const char* name, long otherwise) {
  const char* value = getenv(name);
  return value ? atol(value) : otherwise;
}
inline const int kDevices = int(setting("LATE_DEVICES", 2));

// Whoever waits for the device lets other Python threads go on.
struct WithoutGil {
  PyThreadState* state = nullptr;
  WithoutGil() {
    if (Py_IsInitialized() && PyGILState_Check()) state = PyEval_SaveThread();
  }
  ~WithoutGil() {
    if (state) PyEval_RestoreThread(state);
  }
};

// --- lateness ---------------------------------------------------------------------------------------------------------

// A copy begins up to `copy_us` late; one kernel in `kernel_odds` begins up to `kernel_us` late. Each stream draws from a
// generator of its own, which begins again whenever `set` is called.
struct Lateness {
  std::atomic<long> copy_us{0}, kernel_us{0}, kernel_odds{0}, seed{1}, epoch{1};
  void set(long copies, long kernels, long odds, long with_seed) {
    copy_us = copies, kernel_us = kernels, kernel_odds = odds, seed = with_seed, epoch++;
  }
};
inline Lateness lateness;

// --- what the host pays -----------------------------------------------------------------------------------------------

// Microseconds that a kernel or a copy takes of the thread that asks for it.
inline std::atomic<long> launch_us{0};
inline void launch() {
  if (launch_us) std::this_thread::sleep_for(std::chrono::microseconds(launch_us.load()));
}
// Told whenever the host waits for a device as CUDA does with a core kept busy; null mostly.
inline std::atomic<PyObject*> watcher{nullptr};
inline void tell_watcher(const char* what) {
  auto state = PyGILState_Ensure();
  PyObject* asked = watcher;
  PyObject* answer = asked ? PyObject_CallFunction(asked, "s", what) : nullptr;
  if (asked && !answer) PyErr_WriteUnraisable(asked);
  Py_XDECREF(answer);
  PyGILState_Release(state);
}

// --- health -----------------------------------------------------------------------------------------------------------

// A number of events until something happens; below zero, never.
struct Countdown {
  std::atomic<long> left{-1};
  bool strikes() { return left >= 0 && left-- == 0; }
};

struct Health {
  std::mutex lock;
  std::string error;  // stays, as after an assertion in a kernel of a real device
  std::atomic<bool> broken{false};
  Countdown failing_kernel, loss, refused_allocation;

  void fail(const std::string& why) {
    std::lock_guard<std::mutex> guard(lock);
    if (error.empty()) error = why;
    broken = true;
  }
  // Raise what a kernel has left behind. Every call of the host that touches the device asks.
  void check() {
    if (!broken) return;
    std::lock_guard<std::mutex> guard(lock);
    throw c10::AcceleratorError({__func__, __FILE__, __LINE__}, 710, "late: " + error);
  }
  void heal() {
    std::lock_guard<std::mutex> guard(lock);
    error.clear(), broken = false;
    failing_kernel.left = loss.left = refused_allocation.left = -1;
  }
};
inline Health& health(DeviceIndex device) {
  static auto* all = new std::vector<Health>(kDevices);
  return (*all)[device];
}

// --- tasks ------------------------------------------------------------------------------------------------------------

// `order` is what holds streams together (marks, waits, freeing): never late, and done on a broken device, too.
enum class Kind { order, kernel, copy };

struct Task {
  Kind kind;
  std::function<void()> work;
};

class Queue {
 public:
  Queue(Device device, long number, size_t index) : device_(device), number_(number) { order.index = index; }

  Ordered order;

  void push(Kind kind, std::function<void()> work) {
    if (kind != Kind::order) launch();
    std::lock_guard<std::mutex> guard(lock_);
    if (!started_) {
      started_ = true;
      std::thread([this] { run(); }).detach();
    }
    tasks_.push_back({kind, std::move(work)});
    queued_++;
    work_.notify_one();
  }
  Clock clock() {
    std::lock_guard<std::mutex> guard(order_lock);
    return order.clock;
  }
  bool empty() {
    auto seen = clock();
    std::lock_guard<std::mutex> guard(lock_);
    if (queued_ == done_) host_learns(seen);
    return queued_ == done_;
  }
  void synchronize() {
    WithoutGil nogil;
    auto seen = clock();
    {
      std::unique_lock<std::mutex> guard(lock_);
      auto target = queued_;
      idle_.wait(guard, [&] { return done_ >= target; });
    }
    host_learns(seen);
  }

 private:
  void run();
  void perform(Task& task);
  void delay(Kind kind);

  std::mutex lock_;
  std::condition_variable work_, idle_;
  std::deque<Task> tasks_;
  uint64_t queued_ = 0, done_ = 0;
  Device device_;
  long number_, epoch_ = 0;
  bool started_ = false;
  std::minstd_rand random_;
};

inline void Queue::delay(Kind kind) {
  if (epoch_ != lateness.epoch) {
    epoch_ = lateness.epoch;
    random_.seed(unsigned(lateness.seed * 1000003 + number_));
  }
  long most = 0;
  if (kind == Kind::copy) most = lateness.copy_us;
  if (kind == Kind::kernel && lateness.kernel_odds && random_() % lateness.kernel_odds == 0) most = lateness.kernel_us;
  if (most) std::this_thread::sleep_for(std::chrono::microseconds(random_() % most));
}

inline void Queue::perform(Task& task) {
  auto& state = health(device_.index());
  if (task.kind != Kind::order) {
    delay(task.kind);
    if (state.loss.strikes()) state.fail("the device is lost");
    if (task.kind == Kind::kernel && state.failing_kernel.strikes()) state.fail("device-side assertion in a kernel");
    if (state.broken) return;
  }
  try {
    task.work();
  } catch (const std::exception& error) {
    state.fail(error.what());
  }
}

inline void Queue::run() {
  for (;;) {
    Task task;
    {
      std::unique_lock<std::mutex> guard(lock_);
      work_.wait(guard, [&] { return !tasks_.empty(); });
      task = std::move(tasks_.front());
      tasks_.pop_front();
    }
    perform(task);
    task.work = nullptr;  // what the task held is let go before anyone is told that it is done
    std::lock_guard<std::mutex> guard(lock_);
    done_++;
    idle_.notify_all();
  }
}

// --- marks ------------------------------------------------------------------------------------------------------------

// A point in a stream's order: what an event records.
class Mark {
 public:
  Clock clock;  // of all that comes before it

  void pass() {
    std::lock_guard<std::mutex> guard(lock_);
    auto now = std::chrono::steady_clock::now().time_since_epoch();
    at_ms_ = std::chrono::duration<double, std::milli>(now).count();
    passed_ = true;
    changed_.notify_all();
  }
  void wait() {
    std::unique_lock<std::mutex> guard(lock_);
    changed_.wait(guard, [&] { return passed_; });
  }
  bool passed() {
    std::lock_guard<std::mutex> guard(lock_);
    return passed_;
  }
  double at_ms() {
    std::lock_guard<std::mutex> guard(lock_);
    return at_ms_;
  }

 private:
  std::mutex lock_;
  std::condition_variable changed_;
  bool passed_ = false;
  double at_ms_ = 0;
};
using MarkPointer = std::shared_ptr<Mark>;

inline MarkPointer mark(Queue& queue) {
  auto made = std::make_shared<Mark>();
  {
    std::lock_guard<std::mutex> guard(order_lock);
    join(queue.order.clock, host_clock);
    made->clock = queue.order.clock;
  }
  queue.push(Kind::order, [made] { made->pass(); });
  return made;
}
inline void wait_for(Queue& queue, MarkPointer mark) {
  {
    std::lock_guard<std::mutex> guard(order_lock);
    join(queue.order.clock, mark->clock);
  }
  queue.push(Kind::order, [mark] { mark->wait(); });
}

// --- the streams of a process -----------------------------------------------------------------------------------------

constexpr int kPool = 32;  // as many as torch's own pool has; number 0 is the default stream
inline thread_local DeviceIndex current_device = 0;
inline thread_local int64_t current_stream[64] = {0};

inline std::vector<Queue*>& queues(DeviceIndex device) {
  static auto* all = [] {
    auto* made = new std::vector<std::vector<Queue*>>(kDevices);
    for (int d = 0; d < kDevices; d++)
      for (int i = 0; i <= kPool; i++) (*made)[d].push_back(new Queue(Device(kType, d), 100 * d + i, d * (kPool + 1) + i));
    return made;
  }();
  return (*all)[device];
}
// The host waits for a stream. It is no wait where it has learned that all queued there is done.
inline void note_wait(Queue& queue, const char* what) {
  if (!watcher) return;
  {
    std::lock_guard<std::mutex> guard(order_lock);
    if (at(host_clock, queue.order.index) >= at(queue.order.clock, queue.order.index)) return;
  }
  tell_watcher(what);
}
inline DeviceIndex index_of(Device device) { return device.index() < 0 ? current_device : device.index(); }
inline Queue& current(DeviceIndex device) { return *queues(device)[current_stream[device]]; }
inline void synchronize(DeviceIndex device) {
  for (auto* queue : queues(device)) queue->synchronize();
  health(device).check();
}

}  // namespace late

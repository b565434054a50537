// Operators of the made-up device. Each is the CPU's kernel, run later by the thread of a stream, on the other mapping of
// the same memory; torch's Meta kernels tell the shapes of what it will return. An operator whose result has no shape
// until it is computed (nonzero) waits for its stream and computes at once.
#pragma once
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/DispatchStub.h>
#include <ATen/native/TensorShape.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <ATen/ops/_fused_sdp_choice_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include "memory.h"

namespace late {

using at::Tensor;
using c10::IValue;

inline std::atomic<long> num_kernels{0}, num_waited{0}, num_copies{0};

// --- random numbers ---------------------------------------------------------------------------------------------------

struct Generator final : at::CPUGeneratorImpl {
  explicit Generator(DeviceIndex index) {
    device_ = Device(kType, index);
    key_set_ = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  }
};
inline at::Generator& generator(DeviceIndex device) {
  static auto* all = [] {
    auto* made = new std::vector<at::Generator>;
    for (int d = 0; d < kDevices; d++) made->push_back(at::make_generator<Generator>(d));
    return made;
  }();
  return (*all)[device < 0 ? current_device : device];
}
// The numbers of one kernel: their seed is drawn when the kernel is queued, so that lateness changes none.
inline at::Generator draw(at::Generator from) {
  std::lock_guard<std::mutex> guard(from.mutex());
  return at::make_generator<at::CPUGeneratorImpl>(static_cast<at::CPUGeneratorImpl*>(from.unsafeGetGeneratorImpl())->random64());
}

// --- views of one memory ----------------------------------------------------------------------------------------------

inline bool is_here(const Tensor& tensor) { return tensor.device().type() == kType; }

// The same bytes, for a CPU kernel on the thread of a stream.
inline Tensor shadow_of(const Tensor& tensor) {
  if (!tensor.defined()) return tensor;
  auto* start = tensor.storage().data();
  char* at = start ? seen_by_streams(start) + tensor.storage_offset() * tensor.itemsize() : nullptr;
  auto options = at::TensorOptions().dtype(tensor.dtype()).device(at::kCPU);
  auto made = at::from_blob(at, tensor.sizes(), tensor.strides(), options);
  if (tensor.is_conj()) made._set_conj(true);
  if (tensor.is_neg()) made._set_neg(true);
  return made;
}
inline Tensor meta_of(const Tensor& tensor) {
  return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kMeta).requires_grad(false));
}
// What a kernel that runs later may read of a tensor on the host: its value of now.
inline Tensor frozen(const Tensor& tensor) {
  auto copy = tensor.clone();
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) copy.unsafeGetTensorImpl()->set_wrapped_number(true);
  return copy;
}

// Return `value` with `change(tensor, is_index)` in the place of each tensor.
template <class Change>
IValue mapped(const IValue& value, Change change) {
  if (value.isTensor()) return value.toTensor().defined() ? IValue(change(value.toTensor(), false)) : value;
  if (value.isTensorList()) {
    c10::List<Tensor> list;
    for (const Tensor& each : value.toTensorVector()) list.push_back(each.defined() ? change(each, false) : each);
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> list;
    for (const std::optional<Tensor>& each : value.toOptionalTensorVector())
      list.push_back(each && each->defined() ? std::optional<Tensor>(change(*each, true)) : each);
    return list;
  }
  return value;
}

// Note that a stream reads or writes a tensor on the device.
inline void touch(Queue& queue, const Tensor& tensor, bool writes, const std::string& by) {
  if (!tensor.defined() || !is_here(tensor) || !tensor.numel()) return;
  const auto& memory = tensor.storage().data_ptr();
  if (!memory.get() || memory.get_deleter() != &free_block || health(tensor.device().index()).broken) return;
  int64_t first = tensor.storage_offset(), last = first;
  for (int64_t i = 0; i < tensor.dim(); i++) last += (tensor.size(i) - 1) * tensor.stride(i);
  const char* start = static_cast<const char*>(memory.get());
  auto size = int64_t(tensor.itemsize());
  static_cast<Block*>(memory.get_context())->accesses.note(queue.order, start + first * size, start + (last + 1) * size, writes, by);
}

inline void resize_storage(const c10::Storage& storage, size_t num_bytes) {
  auto* impl = storage.unsafeGetStorageImpl();
  size_t kept = std::min(size_t(impl->nbytes()), num_bytes);
  auto device = impl->device();
  c10::DeviceGuard guard(device);
  auto fresh = device_memory.allocate(num_bytes);
  if (kept) {
    char *to = seen_by_streams(fresh.get()), *from = seen_by_streams(impl->data());
    current(device.index()).push(Kind::kernel, [=] { memcpy(to, from, kept); });
  }
  impl->set_data_ptr_noswap(std::move(fresh));
  impl->set_nbytes(num_bytes);
}
inline void resize_to(const Tensor& tensor, at::IntArrayRef sizes, at::IntArrayRef strides) {
  size_t needed = at::detail::computeStorageNbytes(sizes, strides, tensor.itemsize(), tensor.storage_offset());
  if (needed > tensor.storage().nbytes()) resize_storage(tensor.storage(), needed);
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides);
}

// --- products ---------------------------------------------------------------------------------------------------------

// cuBLAS takes other kernels, which round otherwise, where a matrix does not begin at a multiple of 256 bytes.
inline bool rounds_otherwise(const std::string& name, const std::vector<IValue>& args) {
  static const auto* products = new std::set<std::string>{"aten::mm", "aten::bmm", "aten::addmm", "aten::baddbmm"};
  if (!products->count(name.substr(0, name.find('.')))) return false;
  return std::any_of(args.begin(), args.end(), [](auto& arg) {
    return arg.isTensor() && arg.toTensor().numel() && uintptr_t(arg.toTensor().const_data_ptr()) % 256;
  });
}
// Change the last bit of each number.
inline void round_otherwise(const Tensor& made) {
  if (!made.is_floating_point()) return;
  auto words = made.itemsize() == 2 ? at::kShort : made.itemsize() == 4 ? at::kInt : at::kLong;
  made.view(words).bitwise_xor_(1);
}

// --- any operator -----------------------------------------------------------------------------------------------------

// What torch's Meta kernel answers: the results as tensors without memory, and those that are written into, by argument.
struct Shapes {
  bool asked = false, known = false;
  torch::jit::Stack results;
  std::vector<std::pair<size_t, Tensor>> outs;
};

// One call of an operator, from the stack of its arguments to that of its results.
class Call {
 public:
  Call(const c10::OperatorHandle& op, torch::jit::Stack* stack)
      : op_(op), schema_(op.schema()), stack_(stack), num_args_(schema_.arguments().size()),
        num_results_(schema_.returns().size()), name_(schema_.name() + "." + schema_.overload_name()),
        args_(stack->end() - num_args_, stack->end()), device_(find_device()) {}

  void run() {
    c10::DeviceGuard guard(device_);
    health(device_.index()).check();
    check_arguments();
    read_schema();
    bool shaped = infer_shapes();
    for (size_t i = 0; i < num_args_; i++) touch_all(args_[i], argument(i).alias_info() && argument(i).alias_info()->isWrite());
    torch::jit::drop(*stack_, num_args_);
    shaped ? run_later() : run_now();
  }

 private:
  void touch_all(const IValue& value, bool writes) const {
    mapped(value, [&](const Tensor& tensor, bool) {
      touch(current(device_.index()), tensor, writes, name_);
      return tensor;
    });
  }
  const c10::Argument& argument(size_t i) const { return schema_.arguments()[i]; }
  bool is_out(size_t i) const {
    return argument(i).kwarg_only() && argument(i).alias_info() && argument(i).alias_info()->isWrite();
  }

  Device find_device() const {
    std::optional<Device> found;
    auto look = [&](const Tensor& tensor, bool) {
      if (!is_here(tensor)) return tensor;
      TORCH_CHECK(tensor.numel() == 0 || tensor.storage().data(), "late: ", name_, ": the memory of an argument has gone");
      if (!found) found = tensor.device();
      TORCH_CHECK(*found == tensor.device(), "Expected all tensors to be on the same device, but found at least two "
                  "devices, ", *found, " and ", tensor.device(), "! (", name_, ")");
      return tensor;
    };
    for (auto& arg : args_) mapped(arg, look);
    for (auto& arg : args_)
      if (!found && arg.isDevice() && arg.toDevice().type() == kType) found = Device(kType, index_of(arg.toDevice()));
    TORCH_CHECK(found, "late: ", name_, " has no tensor on the device");
    return *found;
  }

  // As on a GPU: of the host's tensors only numbers and indices may take part.
  void check_arguments() {
    auto check = [&](const Tensor& tensor, bool is_index) -> Tensor {
      if (is_here(tensor) || (tensor.is_cpu() && tensor.dim() == 0 && !is_index)) return tensor;
      TORCH_CHECK(tensor.is_cpu() && is_index, "Expected all tensors to be on the same device, but found at least two "
                  "devices, ", device_, " and ", tensor.device(), "! (", name_, ")");
      return tensor.to(device_);
    };
    for (auto& arg : args_) arg = mapped(arg, check);
  }

  void read_schema() {
    from_.assign(num_results_, -1);
    for (size_t r = 0; r < num_results_; r++) {
      const auto& result = schema_.returns()[r];
      if (!result.alias_info()) {
        makes_new_ = true;
        auto kind = result.type()->kind();
        if (kind != c10::TypeKind::TensorType && kind != c10::TypeKind::ListType) returns_values_ = true;
        continue;
      }
      TORCH_CHECK(result.alias_info()->isWrite(), "late: a view without a kernel: ", name_);
      for (size_t i = 0; i < num_args_; i++)
        if (argument(i).alias_info() && *argument(i).alias_info() == *result.alias_info()) from_[r] = int(i);
    }
    generators_.resize(num_args_);
    for (size_t i = 0; i < num_args_; i++) {
      has_out_ |= is_out(i);
      if (argument(i).name() == "generator")
        generators_[i] = draw(args_[i].isGenerator() ? args_[i].toGenerator() : generator(device_.index()));
    }
  }

  // Find out what the results look like, and give tensors to write into the room they need; false where that takes values.
  bool infer_shapes() {
    if (returns_values_) return false;
    if (!makes_new_ && !has_out_) return true;
    auto key = key_of_call();
    static std::mutex lock;
    static auto* known = new std::unordered_map<std::string, Shapes>;
    {
      std::lock_guard<std::mutex> guard(lock);
      auto found = key.empty() ? known->end() : known->find(key);
      if (found != known->end()) shapes_ = found->second;
    }
    if (!shapes_.asked) {
      ask_meta_kernel();
      std::lock_guard<std::mutex> guard(lock);
      if (!key.empty()) known->emplace(key, shapes_);
    }
    if (!shapes_.known) return false;
    for (auto& [i, meta] : shapes_.outs) {
      auto tensor = args_[i].toTensor();
      if (meta.sizes() != tensor.sizes()) resize_to(tensor, meta.sizes(), meta.strides());
    }
    return true;
  }

  // All that a shape may depend on, as bytes; empty where an argument is of a kind that is not written here.
  // Most Meta kernels are Python's, and take ten times as long as the kernel: each call is asked once.
  std::string key_of_call() const {
    std::string key = name_;
    auto put = [&](const auto& value) { key.append(reinterpret_cast<const char*>(&value), sizeof(value)); };
    bool readable = true;
    auto look = [&](const Tensor& tensor, bool) {
      put('t'), put(tensor.scalar_type()), put(tensor.device().type()), put(tensor.dim());
      put(tensor.unsafeGetTensorImpl()->is_wrapped_number());
      for (auto each : tensor.sizes()) put(each);
      for (auto each : tensor.strides()) put(each);
      return tensor;
    };
    auto read = [&](auto self, const IValue& value) -> void {
      put(value.isNone() ? 'n' : 'v');
      if (value.isTensor()) mapped(value, look);
      else if (value.isInt()) put('i'), put(value.toInt());
      else if (value.isDouble()) put('d'), put(value.toDouble());
      else if (value.isBool()) put('b'), put(value.toBool());
      else if (value.isDevice()) put('D');
      else if (value.isString()) key += value.toStringRef() + '\0';
      else if (value.isList()) {
        put('l'), put(value.toListRef().size());
        for (const IValue& each : value.toListRef()) self(self, each);
      } else readable &= value.isNone();
    };
    for (size_t i = 0; i < num_args_; i++)
      if (argument(i).name() != "generator") read(read, args_[i]);
    return readable ? key : "";
  }

  void ask_meta_kernel() {
    shapes_.asked = true;
    try {
      at::AutoDispatchBelowADInplaceOrView below;
      c10::impl::ExcludeDispatchKeyGuard no_python(
          c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot}));
      auto& metas = shapes_.results;
      for (size_t i = 0; i < num_args_; i++) {
        if (argument(i).name() == "generator") metas.push_back(IValue());
        else if (args_[i].isDevice()) metas.push_back(Device(c10::DeviceType::Meta));
        else metas.push_back(mapped(args_[i], [](const Tensor& t, bool) { return is_here(t) ? meta_of(t) : t; }));
      }
      std::vector<IValue> given = metas;
      op_.callBoxed(&metas);
      for (size_t i = 0; i < num_args_; i++)
        if (is_out(i) && given[i].isTensor()) shapes_.outs.emplace_back(i, given[i].toTensor());
      shapes_.known = true;
    } catch (const c10::OutOfMemoryError&) {
      throw;
    } catch (const std::exception&) {  // no such kernel, or the shape depends on values
    }
  }

  // The arguments as the CPU's kernel takes them; with `fresh_outs` it allocates what it writes into itself.
  std::vector<IValue> for_cpu(bool fresh_outs) const {
    std::vector<IValue> found;
    for (size_t i = 0; i < num_args_; i++) {
      if (!generators_[i].isNone()) found.push_back(generators_[i]);
      else if (args_[i].isDevice()) found.push_back(Device(c10::DeviceType::CPU));
      else if (fresh_outs && is_out(i) && args_[i].isTensor())
        found.push_back(at::empty({0}, args_[i].toTensor().options().device(at::kCPU)));
      else
        found.push_back(mapped(args_[i], [](const Tensor& t, bool) { return is_here(t) ? shadow_of(t) : frozen(t); }));
    }
    return found;
  }

  void run_later() {
    num_kernels++;
    std::vector<IValue> results(num_results_), places(num_results_);
    for (size_t r = 0; r < num_results_; r++) {
      if (from_[r] >= 0) {
        results[r] = args_[from_[r]];
        continue;
      }
      results[r] = mapped(shapes_.results[r], [&](const Tensor& meta, bool) {
        return at::empty_strided(meta.sizes(), meta.strides(), meta.options().device(device_));
      });
      touch_all(results[r], true);
      places[r] = mapped(results[r], [](const Tensor& tensor, bool) { return shadow_of(tensor); });
    }
    auto work = [op = op_, args = for_cpu(false), places, name = name_]() mutable { compute(op, args, places, name); };
    current(device_.index()).push(Kind::kernel, std::move(work));
    for (auto& result : results) stack_->push_back(result);
  }

  // On the thread of a stream: call the CPU's kernel, and put what it returns where it was promised.
  static void compute(const c10::OperatorHandle& op, std::vector<IValue>& args, std::vector<IValue>& places,
                      const std::string& name) {
    at::AutoDispatchBelowADInplaceOrView below;
    torch::jit::Stack stack(args.begin(), args.end());
    // The CPU's kernel keeps statistics in the dtype of the weight, those of devices in fp32.
    if (name == "aten::native_layer_norm_backward.")
      for (int i : {3, 4}) {
        bool weighted = stack[5].isTensor() && stack[5].toTensor().defined();
        stack[i] = stack[i].toTensor().to(stack[weighted ? 5 : 1].toTensor().scalar_type());
      }
    try {
      op.callBoxed(&stack);
    } catch (const std::exception& error) {
      throw std::runtime_error(name + ": " + error.what());
    }
    if (rounds_otherwise(name, args))
      for (auto& made : stack)
        if (made.isTensor()) round_otherwise(made.toTensor());
    for (size_t r = 0; r < places.size(); r++) {
      if (places[r].isTensor() && places[r].toTensor().defined()) {
        auto made = stack[r].toTensor();
        TORCH_CHECK(places[r].toTensor().sizes() == made.sizes(), "late: another shape than promised by ", name);
        places[r].toTensor().copy_(made);
      } else if (places[r].isTensorList()) {
        auto to = places[r].toTensorVector(), made = stack[r].toTensorVector();
        for (size_t i = 0; i < to.size(); i++) to[i].copy_(made[i]);
      }
    }
  }

  void run_now() {
    num_waited++;
    auto& queue = current(device_.index());
    note_wait(queue, name_.c_str());
    queue.synchronize();
    health(device_.index()).check();
    auto args = for_cpu(has_out_);
    torch::jit::Stack made(args.begin(), args.end());
    {
      at::AutoDispatchBelowADInplaceOrView below;
      op_.callBoxed(&made);
    }
    auto put = [&](const Tensor& into, const Tensor& value) {
      queue.push(Kind::kernel, [to = shadow_of(into), value]() mutable { to.copy_(value); });
    };
    auto up = [&](const Tensor& value, bool) {
      auto tensor = at::empty_strided(value.sizes(), value.strides(), value.options().device(device_));
      touch(queue, tensor, true, name_);
      put(tensor, value);
      return tensor;
    };
    for (size_t r = 0; r < num_results_; r++) {
      if (from_[r] < 0) {
        stack_->push_back(mapped(made[r], up));
        continue;
      }
      if (has_out_ && args_[from_[r]].isTensor()) {
        auto tensor = args_[from_[r]].toTensor(), value = made[r].toTensor();
        if (tensor.sizes() != value.sizes()) resize_to(tensor, value.sizes(), value.strides());
        put(tensor, value);
      }
      stack_->push_back(args_[from_[r]]);
    }
  }

  const c10::OperatorHandle& op_;
  const c10::FunctionSchema& schema_;
  torch::jit::Stack* stack_;
  size_t num_args_, num_results_;
  std::string name_;
  std::vector<IValue> args_, generators_;
  Device device_;
  std::vector<int> from_;  // by result: the argument that it is; -1 of a new one
  bool has_out_ = false, makes_new_ = false, returns_values_ = false;
  Shapes shapes_;
};

inline void any_operator(const c10::OperatorHandle& op, torch::jit::Stack* stack) { Call(op, stack).run(); }

// --- operators of its own ---------------------------------------------------------------------------------------------

inline Device device_asked(std::optional<Device> device) {
  return Device(kType, index_of(device.value_or(Device(kType, -1))));
}
inline Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                    std::optional<Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(device_asked(device));
  auto keys = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_generic(size, &device_memory, keys, c10::dtype_or_default(dtype), format);
}
inline Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                            std::optional<at::Layout>, std::optional<Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(device_asked(device));
  auto keys = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_strided_generic(size, stride, &device_memory, keys, c10::dtype_or_default(dtype));
}

// Between devices as torch copies between GPUs: on the source's stream, which waits for the target's and the other way.
inline Tensor copy_between(const Tensor& source, const Tensor& target) {
  auto& here = current(source.device().index());
  auto work = [to = shadow_of(target), from = shadow_of(source)]() mutable { to.copy_(from); };
  if (source.device() == target.device()) {
    touch(here, source, false, "a copy on the device");
    touch(here, target, true, "a copy on the device");
    here.push(Kind::kernel, work);
    return target;
  }
  auto& there = current(target.device().index());
  num_copies++;
  wait_for(here, mark(there));
  touch(here, source, false, "a copy to another device");
  touch(here, target, true, "a copy from another device");
  here.push(Kind::copy, work);
  wait_for(there, mark(here));
  return target;
}
inline Tensor of_host(void* at, const Tensor& like) {
  return at::from_blob(at, like.sizes(), like.strides(), like.options().requires_grad(false));
}
inline Tensor copy_from(const Tensor& asked, const Tensor& target, bool non_blocking) {
  auto source = asked.sizes() == target.sizes() ? asked : asked.expand(target.sizes());
  if (target.numel() == 0) return target;
  bool up = source.is_cpu();
  const auto& there = up ? target : source;
  for (auto& each : {source, target})
    if (is_here(each)) health(each.device().index()).check();
  if (!up && !target.is_cpu()) return copy_between(source, target);

  num_copies++;
  auto device = there.device().index();
  Queue& queue = current(device);
  const auto& host = up ? source : target;
  bool direct = source.scalar_type() == target.scalar_type() && source.is_non_overlapping_and_dense() &&
                target.strides() == source.strides() && !source.is_conj() && !source.is_neg() && pinned_memory.holds(host.const_data_ptr());
  bool waits = !non_blocking;
  // What is not pinned is staged, up to 64 KiB of it at once, and down not before it is there.
  if (waits || (!direct && (!up || host.nbytes() > 65536))) note_wait(queue, direct ? "a copy" : "a copy of memory that is not pinned");
  touch(queue, there, up, up ? "a copy up" : "a copy down");
  if (direct) pinned_memory.note_access(queue.order, static_cast<const char*>(host.const_data_ptr()), host.nbytes(), !up);
  if (up) {  // memory that is not pinned is staged before the call returns
    auto from = direct ? of_host(const_cast<void*>(source.const_data_ptr()), source) : source.detach().clone();
    queue.push(Kind::copy, [to = shadow_of(target), from]() mutable { to.copy_(from); });
  } else {
    waits |= !direct;
    auto to = waits ? target.detach() : of_host(target.mutable_data_ptr(), target);
    queue.push(Kind::copy, [to, from = shadow_of(source)]() mutable { to.copy_(from); });
  }
  if (direct) pinned_memory.note_copy(host.const_data_ptr(), mark(queue));
  if (waits) {
    queue.synchronize();
    health(device).check();
  }
  return target;
}
inline Tensor copy_from_and_resize(const Tensor& source, const Tensor& target) {
  target.resize_(source.sizes());
  return copy_from(source, target, false);
}
inline at::Scalar local_scalar(const Tensor& tensor) {
  auto device = tensor.device().index();
  note_wait(current(device), "a number for the host");
  touch(current(device), tensor, false, "a number for the host");
  current(device).synchronize();
  health(device).check();
  return shadow_of(tensor).item();
}

inline const Tensor& resize_(const Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat>) {
  std::vector<int64_t> strides(size.size());
  int64_t step = 1;
  for (int i = int(size.size()) - 1; i >= 0; i--) {
    strides[i] = step;
    step *= std::max<int64_t>(size[i], 1);
  }
  if (self.sizes() != size) resize_to(self, size, strides);
  return self;
}
inline void record_stream(Tensor& tensor, c10::Stream stream) {
  device_memory.recordStream(tensor.storage().data_ptr(), stream);
}
inline Tensor& set_storage(Tensor& self, c10::Storage source, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(source);
  impl->set_storage_offset(offset);
  if (stride.data() && stride.size() == size.size()) impl->set_sizes_and_strides(size, stride);
  else impl->set_sizes_contiguous(size);
  return self;
}
inline Tensor& set_source(Tensor& self, c10::Storage source) {
  return set_storage(self, source, 0, {int64_t(source.nbytes() / self.itemsize())}, {});
}
inline Tensor& set_nothing(Tensor& self) {
  c10::DeviceGuard guard(self.device());
  return set_storage(self, c10::Storage(c10::Storage::use_byte_size_t(), 0, &device_memory, true), 0, {0}, {});
}
inline Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}
inline std::tuple<Tensor, Tensor> native_dropout(const Tensor& x, double p, std::optional<bool> train) {
  if (!train.value_or(true)) return {x.clone(), at::ones_like(x, x.options().dtype(at::kBool))};
  auto mask = at::empty_like(x, x.options().dtype(at::kBool));
  mask.bernoulli_(1 - p);
  return {x * mask * (p == 1 ? 0.0 : 1 / (1 - p)), mask};
}
// Attention in one kernel where the CPU has one, which saves the state of random numbers as GPUs' attention does.
inline int64_t attention_choice(const Tensor& q, const Tensor& k, const Tensor& v, const std::optional<Tensor>& mask, double p,
                                bool is_causal, std::optional<double> scale, bool enable_gqa) {
  auto form = [](const Tensor& t) { return at::empty_strided(t.sizes(), t.strides(), t.options().device(at::kCPU)).requires_grad_(t.requires_grad()); };
  auto chosen = at::native::_fused_sdp_choice_cpp(
      form(q), form(k), form(v), mask ? std::optional<Tensor>(form(*mask)) : std::nullopt, p, is_causal, scale, enable_gqa);
  return chosen == int64_t(sdp::SDPBackend::flash_attention) ? int64_t(sdp::SDPBackend::overrideable) : chosen;
}
inline std::tuple<Tensor, Tensor, Tensor, Tensor, c10::SymInt, c10::SymInt, Tensor, Tensor, Tensor> attention(
    const Tensor& q, const Tensor& k, const Tensor& v, const std::optional<Tensor>& mask, double p, bool is_causal, bool,
    std::optional<double> scale) {
  auto [out, logsumexp] = at::_scaled_dot_product_flash_attention_for_cpu(q, k, v, p, is_causal, mask, scale);
  auto state = [&] { return at::zeros({}, q.options().dtype(at::kLong)); };
  return {out, logsumexp, Tensor(), Tensor(), q.sym_size(2), k.sym_size(2), state(), state(), Tensor()};
}
inline std::tuple<Tensor, Tensor, Tensor, Tensor> attention_backward(
    const Tensor& grad, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& mask, std::array<bool, 4>, const Tensor& out,
    const Tensor& logsumexp, const Tensor&, const Tensor&, int64_t, int64_t, double p, bool is_causal, const Tensor&,
    const Tensor&, std::optional<double> scale) {
  auto given = mask.defined() ? std::optional<Tensor>(mask) : std::nullopt;
  // Partial gradients of queries in fp32, as flash attention has them where bits are to repeat.
  Tensor partial;
  if (at::globalContext().deterministicAlgorithms()) partial = at::empty({16, q.numel()}, q.options().dtype(at::kFloat));
  auto [dq, dk, dv] =
      at::_scaled_dot_product_flash_attention_for_cpu_backward(grad, q, k, v, out, logsumexp, p, is_causal, given, scale);
  return {dq, dk, dv, Tensor()};
}
// torch asks devices of this key for operators of their own where the CPU's are called by other names.
inline c10::OperatorHandle named(const char* name) { return c10::Dispatcher::singleton().findSchemaOrThrow(name, ""); }
inline void convolution(const c10::OperatorHandle&, torch::jit::Stack* stack) {
  static auto op = named("aten::convolution");
  Call(op, stack).run();
}
inline void convolution_backward(const c10::OperatorHandle&, torch::jit::Stack* stack) {
  static auto op = named("aten::convolution_backward");
  constexpr int kArguments = 10, kWeight = 2;  // behind the weight: how many numbers a bias has
  auto weight = stack->end() - kArguments + kWeight;
  bool transposed = (weight + 4)->toBool();
  int64_t num = weight->toTensor().size(transposed) * (transposed ? (weight + 6)->toInt() : 1);
  stack->insert(weight + 1, IValue(std::vector<int64_t>{num}));
  Call(op, stack).run();
}
inline Tensor as_strided(const Tensor& self, at::IntArrayRef size, at::IntArrayRef stride, std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, size, stride, offset);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&any_operator>()); }
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar);
  m.impl("resize_", resize_);
  m.impl("record_stream", record_stream);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_.source_Storage", set_source);
  m.impl("set_", set_nothing);
  m.impl("native_dropout", native_dropout);
  m.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution>());
  m.impl("convolution_backward_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution_backward>());
  m.impl("_scaled_dot_product_fused_attention_overrideable", attention);
  m.impl("_scaled_dot_product_fused_attention_overrideable_backward", attention_backward);
  m.impl("as_strided", as_strided);
  m.impl("view", TORCH_FN(at::native::view));
  m.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  m.impl("unfold", TORCH_FN(at::native::unfold));
  m.impl("view_as_real", TORCH_FN(at::native::view_as_real));
  m.impl("view_as_complex", TORCH_FN(at::native::view_as_complex));
}
// A copy reads what is conjugated or negated by a flag of its own; else torch would copy it to have it resolved first.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, Negative, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }

}  // namespace late

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &late::attention_choice)
}

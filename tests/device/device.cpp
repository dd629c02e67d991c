// A device "strict": memory of the host, every operator by the CPU's kernel, and a transport that takes what NCCL takes.
#include <ATen/ATen.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/EmptyTensor.h>
#include <ATen/Utils.h>
#include <ATen/Context.h>
#include <c10/core/CPUAllocator.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/view_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

namespace {

constexpr auto kStrict = c10::DeviceType::PrivateUse1;
constexpr c10::DeviceIndex kDevices = 4;
thread_local c10::DeviceIndex current_device = 0;
thread_local c10::StreamId current_stream[kDevices] = {};
std::atomic<int64_t> reads_by_the_host{0}, writes_by_the_host{0};

// Memory --------------------------------------------------------------------------------------------------------------

struct Allocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* memory = bytes ? std::aligned_alloc(64, (bytes + 63) / 64 * 64) : nullptr;
    return {memory, memory, &std::free, c10::Device(kStrict, current_device)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &std::free; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { std::memcpy(to, from, bytes); }
};
Allocator allocator;
REGISTER_ALLOCATOR(kStrict, &allocator);

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kStrict; }
  c10::Device exchangeDevice(c10::Device to) const override {
    auto old = getDevice();
    current_device = to.index() < 0 ? current_device : to.index();
    return old;
  }
  c10::Device getDevice() const override { return {kStrict, current_device}; }
  void setDevice(c10::Device to) const override { exchangeDevice(to); }
  void uncheckedSetDevice(c10::Device to) const noexcept override { current_device = to.index(); }
  c10::DeviceIndex index(c10::Device device) const { return device.index() < 0 ? current_device : device.index(); }
  c10::Stream getStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::UNSAFE, {kStrict, index(device)}, current_stream[index(device)]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, {kStrict, index(device)});
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream getNewStream(c10::Device device, int) const override {
    static std::atomic<c10::StreamId> next{1};
    return c10::Stream(c10::Stream::UNSAFE, {kStrict, index(device)}, next++);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    auto old = getStream(stream.device());
    current_stream[stream.device_index()] = stream.id();
    return old;
  }
  void record(void** event, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (!*event) *event = new int(0);
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<int*>(event); }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  c10::DeviceIndex getCurrentDevice() const override { return current_device; }
  void setCurrentDevice(c10::DeviceIndex to) const override { current_device = to; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex to) const override { return std::exchange(current_device, to); }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex to) const override {
    return std::exchange(current_device, to < 0 ? current_device : to);
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return at::globalContext().defaultGenerator(at::kCPU);
  }
  at::Allocator* getPinnedMemoryAllocator() const override { return c10::GetCPUAllocator(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    auto memory = allocator.allocate(bytes);
    if (storage.nbytes() && bytes) std::memcpy(memory.get(), storage.data(), std::min(bytes, storage.nbytes()));
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(memory));
    storage.unsafeGetStorageImpl()->set_nbytes(bytes);
  }
};

// Operators -----------------------------------------------------------------------------------------------------------

using at::Tensor;

Tensor on_host(const Tensor& x) {  // the same memory, seen by the CPU; it keeps x
  if (!x.device().is_privateuseone()) return x;
  auto seen = at::from_blob(x.data_ptr(), x.sizes(), x.strides(), [x](void*) {}, x.options().device(at::kCPU));
  seen.unsafeGetTensorImpl()->_set_conj(x.is_conj());
  seen._set_neg(x.is_neg());
  return seen;
}

c10::Device place(std::optional<c10::Device> device) {
  return device && device->index() >= 0 ? *device : c10::Device(kStrict, current_device);
}

Tensor empty(c10::IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
             std::optional<c10::Device> device, std::optional<bool> pin, std::optional<c10::MemoryFormat> format) {
  c10::DeviceGuard guard(place(device));
  return at::detail::empty_generic(size, &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}
Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<c10::ScalarType> dtype,
                     std::optional<c10::Layout>, std::optional<c10::Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(place(device));
  return at::detail::empty_strided_generic(size, stride, &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}
Tensor copy_from(const Tensor& self, const Tensor& to, bool non_blocking) {
  if (self.device().is_privateuseone() && !to.device().is_privateuseone()) ++reads_by_the_host;
  if (!self.device().is_privateuseone() && !non_blocking) ++writes_by_the_host;
  auto target = on_host(to);
  target.copy_(on_host(self));
  return to;
}
Tensor copy_from_and_resize(const Tensor& self, const Tensor& to) {
  if (self.sizes() != to.sizes()) at::native::resize_(to, self.sizes(), std::nullopt);
  on_host(to).copy_(on_host(self));
  return to;
}
at::Scalar local_scalar_dense(const Tensor& self) {
  ++reads_by_the_host;
  return on_host(self).item();
}
Tensor view(const Tensor& x, c10::SymIntArrayRef size) { return at::native::view(x, C10_AS_INTARRAYREF_SLOW(size)); }
Tensor reshape_alias(const Tensor& x, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(x, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}
Tensor as_strided(const Tensor& x, c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<c10::SymInt> at) {
  return at::cpu::as_strided_symint(x, size, stride, at);
}
const Tensor& resize_(const Tensor& x, c10::SymIntArrayRef size, std::optional<c10::MemoryFormat> format) {
  return at::native::resize_(x, C10_AS_INTARRAYREF_SLOW(size), format);
}
Tensor& set_storage(Tensor& x, c10::Storage s, c10::SymInt at, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::cpu::set_(x, s, at.expect_int(), C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}
Tensor unfold(const Tensor& x, int64_t dim, int64_t size, int64_t step) { return at::native::unfold(x, dim, size, step); }

void by_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  c10::Device device(kStrict, current_device);
  for (auto& value : torch::jit::last(*stack, op.schema().arguments().size()))
    if (value.isTensor() && value.toTensor().defined() && value.toTensor().device().is_privateuseone())
      device = value.toTensor().device();
  c10::DeviceGuard guard(device);
  auto before = reads_by_the_host.load(), written = writes_by_the_host.load();
  at::native::cpu_fallback(op, stack, /*error_on_views=*/true);
  reads_by_the_host = before;
  writes_by_the_host = written;
}

// Transport -----------------------------------------------------------------------------------------------------------

using c10d::Work;
template <class T> using Ptr = c10::intrusive_ptr<T>;
using Tensors = std::vector<Tensor>;

struct Done final : Work {
  Done(int rank, c10d::OpType type, Tensors results, c10::Device device)
      : Work(rank, type), results_(std::move(results)),
        future_(c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()),
                                                         std::vector<c10::Device>{device})) {
    future_->markCompleted(c10::IValue(results_));
    finish();
  }
  bool wait(std::chrono::milliseconds) override { return true; }
  Tensors result() override { return results_; }
  Ptr<c10::ivalue::Future> getFuture() override { return future_; }
  Tensors results_;
  Ptr<c10::ivalue::Future> future_;
};

struct Strict final : c10d::Backend {
  Ptr<Backend> gloo;
  c10::DeviceIndex bound = -1;  // a communicator belongs to one device
  bool together = false;
  std::vector<Ptr<Work>> pending;
  Tensors given;
  Ptr<Options> options_;

  Strict(Ptr<Backend> inner, int64_t timeout)
      : Backend(inner->getRank(), inner->getSize()), gloo(std::move(inner)),
        options_(c10::make_intrusive<Options>("strict", std::chrono::milliseconds(timeout))) {}
  const std::string getBackendName() const override { return "strict"; }
  bool supportsCoalescing() const override { return true; }
  Ptr<Options> getBackendOptions() override { return options_; }
  void setTimeout(std::chrono::milliseconds timeout) override { options_->timeout = timeout; }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return 0; }

  Tensor take(const Tensor& x, const char* what) {
    TORCH_CHECK(x.device().is_privateuseone(), "strict ", what, ": tensors must be on the device, got one on ", x.device());
    TORCH_CHECK(!x.is_sparse(), "strict ", what, ": tensors must be dense");
    TORCH_CHECK(x.is_contiguous(x.suggest_memory_format()), "strict ", what, ": tensors must be contiguous, got ", x.sizes(), x.strides());
    TORCH_CHECK(!x.is_conj() && !x.is_neg(), "strict ", what, ": conjugated lazily");
    switch (x.scalar_type()) {
      case at::kChar: case at::kByte: case at::kFloat: case at::kDouble: case at::kInt: case at::kLong: case at::kHalf:
      case at::kBool: case at::kBFloat16: case at::kFloat8_e4m3fn: case at::kFloat8_e5m2: break;
      default: TORCH_CHECK(false, "strict ", what, ": Input tensor data type is not supported for NCCL process group: ", x.scalar_type());
    }
    TORCH_CHECK(bound < 0 || bound == x.device().index(), "strict ", what, ": the communicator is of device ", (int)bound, ", the tensor on ", x.device());
    bound = x.device().index();
    auto seen = on_host(x);
    return seen.is_contiguous() ? seen : at::from_blob(x.data_ptr(), {x.numel()}, [x](void*) {}, seen.options());
  }
  Tensor pairs(const Tensor& x) { return x.is_complex() ? at::view_as_real(x) : x; }
  Tensors take(const Tensors& xs, const char* what) {
    Tensors seen;
    for (auto& x : xs) seen.push_back(take(x, what));
    return seen;
  }
  static Tensor bits(const Tensor& x) {  // what moves only
    auto type = x.scalar_type();
    return type == at::kBool || type == at::kFloat8_e4m3fn || type == at::kFloat8_e5m2 ? x.view(at::kByte)
        : type == at::kBFloat16 ? x.view(at::kHalf) : x;
  }
  c10d::ReduceOp checked(const c10d::ReduceOp& op, const Tensor& x, bool complex, const char* what) {
    auto name = op.op_;
    TORCH_CHECK(name != c10d::ReduceOp::BAND && name != c10d::ReduceOp::BOR && name != c10d::ReduceOp::BXOR,
                "Cannot use ReduceOp.B* with NCCL");
    TORCH_CHECK(!complex || name == c10d::ReduceOp::SUM || name == c10d::ReduceOp::AVG || name == c10d::ReduceOp::PREMUL_SUM,
                what, " does not support this op on complex tensors");
    TORCH_CHECK(x.scalar_type() != at::kFloat8_e4m3fn && x.scalar_type() != at::kFloat8_e5m2, "no reductions of float8");
    return name == c10d::ReduceOp::AVG ? c10d::ReduceOp(c10d::ReduceOp::SUM) : op;
  }
  Ptr<Work> done(c10d::OpType type, Ptr<Work> work, Tensors results) {
    if (together) {
      pending.push_back(work);
      given.insert(given.end(), results.begin(), results.end());
      return c10::make_intrusive<Done>(rank_, type, results, results.at(0).device());
    }
    if (work) work->wait();
    return c10::make_intrusive<Done>(rank_, type, results, results.at(0).device());
  }
  void startCoalescing() override { together = true; }
  Ptr<Work> endCoalescing() override {
    together = false;
    for (auto& work : std::exchange(pending, {})) work->wait();
    auto results = std::exchange(given, {});
    TORCH_CHECK(!results.empty(), "strict: nothing was coalesced");
    return c10::make_intrusive<Done>(rank_, c10d::OpType::COALESCED, results, results[0].device());
  }
  Ptr<Work> broadcast(Tensors& xs, const c10d::BroadcastOptions& o) override {
    TORCH_CHECK(xs.size() == 1, "one tensor");
    Tensors in{bits(take(pairs(xs[0]), "broadcast"))};
    return done(c10d::OpType::BROADCAST, gloo->broadcast(in, o), xs);
  }
  Ptr<Work> allreduce(Tensors& xs, const c10d::AllreduceOptions& o) override {
    TORCH_CHECK(xs.size() == 1, "one tensor");
    auto options = o;
    Tensors in{take(pairs(xs[0]), "allreduce")};
    bool average = o.reduceOp.op_ == c10d::ReduceOp::AVG;
    options.reduceOp = checked(o.reduceOp, in[0], xs[0].is_complex(), "allreduce");
    auto work = gloo->allreduce(in, options);
    work->wait();
    if (average) in[0].div_(size_);
    return done(c10d::OpType::ALLREDUCE, together ? work : nullptr, xs);
  }
  Ptr<Work> allreduce_coalesced(Tensors& xs, const c10d::AllreduceCoalescedOptions& o) override {
    c10d::AllreduceOptions options;
    options.reduceOp = o.reduceOp;
    for (auto& x : xs) { Tensors one{x}; allreduce(one, options); }
    return done(c10d::OpType::COALESCED, nullptr, xs);
  }
  Ptr<Work> reduce(Tensors& xs, const c10d::ReduceOptions& o) override {
    Tensors in{take(pairs(xs[0]), "reduce")};
    auto options = o;
    options.reduceOp = checked(o.reduceOp, in[0], xs[0].is_complex(), "reduce");
    return done(c10d::OpType::REDUCE, gloo->reduce(in, options), xs);
  }
  Ptr<Work> allgather(std::vector<Tensors>& outs, Tensors& xs, const c10d::AllgatherOptions& o) override {
    Tensors in{bits(take(pairs(xs[0]), "allgather"))};
    bool same = true;
    for (auto& x : outs[0]) same &= x.sizes() == outs[0][0].sizes();
    std::vector<Tensors> to(1);
    for (auto& x : outs[0]) to[0].push_back(bits(take(pairs(x), "allgather")));
    if (same) return done(c10d::OpType::ALLGATHER, gloo->allgather(to, in, o), outs[0]);
    // NCCL: uneven ones are broadcasts
    for (int root = 0; root < size_; ++root) {
      if (root == rank_) to[0][root].copy_(in[0]);
      Tensors one{to[0][root]};
      c10d::BroadcastOptions b; b.rootRank = root;
      gloo->broadcast(one, b)->wait();
    }
    return done(c10d::OpType::ALLGATHER, nullptr, outs[0]);
  }
  Ptr<Work> _allgather_base(Tensor& out, Tensor& x, const c10d::AllgatherOptions& o) override {
    TORCH_CHECK(x.dtype() == out.dtype(), "output tensor must have the same type as input tensor");
    TORCH_CHECK(x.numel() * size_ == out.numel(), "output tensor size must be equal to world_size times input tensor size");
    auto to = bits(take(out, "allgather_base")), in = bits(take(x, "allgather_base"));
    return done(c10d::OpType::_ALLGATHER_BASE, gloo->_allgather_base(to, in, o), {out});
  }
  Ptr<Work> allgather_into_tensor_coalesced(Tensors& outs, Tensors& xs, const c10d::AllgatherOptions& o) override {
    for (size_t i = 0; i < xs.size(); ++i) _allgather_base(outs[i], xs[i], o);
    return done(c10d::OpType::COALESCED, nullptr, outs);
  }
  Ptr<Work> reduce_scatter(Tensors& outs, std::vector<Tensors>& xs, const c10d::ReduceScatterOptions& o) override {
    auto in = take(xs[0], "reduce_scatter");
    std::vector<Tensors> from{in};
    Tensors to{take(outs[0], "reduce_scatter")};
    auto options = o;
    options.reduceOp = checked(o.reduceOp, to[0], false, "reduce_scatter");
    return done(c10d::OpType::REDUCE_SCATTER, gloo->reduce_scatter(to, from, options), outs);
  }
  Ptr<Work> _reduce_scatter_base(Tensor& out, Tensor& x, const c10d::ReduceScatterOptions& o) override {
    TORCH_CHECK(x.dtype() == out.dtype(), "input tensor must be the same type as the output tensor.");
    TORCH_CHECK(x.numel() == out.numel() * size_, "input tensor must be the same size as output size times world size");
    auto to = take(out, "reduce_scatter_base"), in = take(x, "reduce_scatter_base");
    auto options = o;
    bool average = o.reduceOp.op_ == c10d::ReduceOp::AVG;
    options.reduceOp = checked(o.reduceOp, in, false, "reduce_scatter_base");
    auto work = gloo->_reduce_scatter_base(to, in, options);
    work->wait();
    if (average) to.div_(size_);
    return done(c10d::OpType::_REDUCE_SCATTER_BASE, nullptr, {out});
  }
  Ptr<Work> reduce_scatter_tensor_coalesced(Tensors& outs, Tensors& xs, const c10d::ReduceScatterOptions& o) override {
    for (size_t i = 0; i < xs.size(); ++i) _reduce_scatter_base(outs[i], xs[i], o);
    return done(c10d::OpType::COALESCED, nullptr, outs);
  }
  Ptr<Work> alltoall_base(Tensor& out, Tensor& x, std::vector<int64_t>& to_sizes, std::vector<int64_t>& from_sizes,
                          const c10d::AllToAllOptions& o) override {
    TORCH_CHECK(x.dtype() == out.dtype(), "Tensors are not the same data type");
    auto to = bits(take(out, "alltoall_base")), in = bits(take(x, "alltoall_base"));
    return done(c10d::OpType::ALLTOALL_BASE, gloo->alltoall_base(to, in, to_sizes, from_sizes, o), {out});
  }
  Ptr<Work> alltoall(Tensors& outs, Tensors& xs, const c10d::AllToAllOptions& o) override {
    auto to = take(outs, "alltoall"), in = take(xs, "alltoall");
    return done(c10d::OpType::ALLTOALL, gloo->alltoall(to, in, o), outs);
  }
  Ptr<Work> send(Tensors& xs, int to, int) override {
    Tensors in{bits(take(xs[0], "send"))};
    return done(c10d::OpType::SEND, gloo->send(in, to, 0), xs);
  }
  Ptr<Work> recv(Tensors& xs, int from, int) override {
    Tensors in{bits(take(xs[0], "recv"))};
    return done(c10d::OpType::RECV, gloo->recv(in, from, 0), xs);
  }
  Ptr<Work> gather(std::vector<Tensors>& outs, Tensors& xs, const c10d::GatherOptions& o) override {
    Tensors in{bits(take(xs[0], "gather"))};
    std::vector<Tensors> to;
    for (auto& list : outs) { to.emplace_back(); for (auto& x : list) to.back().push_back(bits(take(x, "gather"))); }
    return done(c10d::OpType::GATHER, gloo->gather(to, in, o), xs);
  }
  Ptr<Work> scatter(Tensors& outs, std::vector<Tensors>& xs, const c10d::ScatterOptions& o) override {
    Tensors to{bits(take(outs[0], "scatter"))};
    std::vector<Tensors> in;
    for (auto& list : xs) { in.emplace_back(); for (auto& x : list) in.back().push_back(bits(take(x, "scatter"))); }
    return done(c10d::OpType::SCATTER, gloo->scatter(to, in, o), outs);
  }
  Ptr<Work> barrier(const c10d::BarrierOptions& o) override {
    auto x = at::empty({1}, at::TensorOptions().device(c10::Device(kStrict, bound < 0 ? current_device : bound)));
    return done(c10d::OpType::BARRIER, gloo->barrier(), {x});
  }
};

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&by_cpu>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar_dense);
  m.impl("view", view);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("as_strided", as_strided);
  m.impl("resize_", resize_);
  m.impl("unfold", unfold);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Storage", [](Tensor& x, c10::Storage s) -> Tensor& {
    int64_t n = s.nbytes() / x.itemsize();
    return at::cpu::set_(x, s, 0, {n}, {1});
  });
  m.impl("is_set_to", [](const Tensor& x, const Tensor& y) {
    return x.storage().is_alias_of(y.storage()) && x.storage_offset() == y.storage_offset() && x.sizes() == y.sizes() &&
        x.strides() == y.strides();
  });
  m.impl("set_.source_Tensor", [](Tensor& x, const Tensor& y) -> Tensor& {
    return at::cpu::set_(x, y.storage(), y.storage_offset(), y.sizes(), y.strides());
  });
  m.impl("view_as_real", [](const Tensor& x) { return at::native::view_as_real(x); });
  m.impl("view_as_complex", [](const Tensor& x) { return at::native::view_as_complex(x); });
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  m.def("transport", [](Ptr<c10d::Backend> gloo, int64_t timeout) -> Ptr<c10d::Backend> {
    return c10::make_intrusive<Strict>(gloo, timeout);
  }, py::call_guard<py::gil_scoped_release>());
  m.def("reads_by_the_host", [] { return reads_by_the_host.load(); });
  m.def("writes_by_the_host", [] { return writes_by_the_host.load(); });
  m.def("current_device", [] { return (int)current_device; });
  m.def("set_device", [](int to) { current_device = to; });
}

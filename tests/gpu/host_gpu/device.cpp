// CUDA's device 0, made of the host: its memory is the host's, its operators are the CPU's.
//
// A tensor of this device has the dispatch keys, and thus takes the ways through autograd, Dynamo
// and Inductor, of one on a GPU. Only at the very end, where CUDA's kernel of an operator would be
// looked up, `run_on_host` hands the same bytes to the CPU's kernel. What Inductor compiles does
// not come here: its Triton kernels get the tensors' addresses.
//
// Loaded before torch is imported, since torch looks up CUDA's hooks once.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Tensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <utility>
#include <vector>

namespace {

const c10::Device gpu(c10::DeviceType::CUDA, 0);

// ---- What torch asks of a device: which one is current, on which stream, how many there are ----

struct DeviceGuard : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> {
  c10::Device exchangeDevice(c10::Device) const override { return gpu; }
  c10::Device getDevice() const override { return gpu; }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  c10::Stream getStream(c10::Device) const noexcept override {
    return c10::Stream(c10::Stream::DEFAULT, gpu);
  }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return getStream(gpu); }
};

c10::impl::DeviceGuardImplRegistrar guard_registrar(c10::DeviceType::CUDA, new DeviceGuard);

}  // namespace

// ---- What torch asks of CUDA: that it is there, random numbers, pinned memory ----

// Torch looks the class up by this name.
struct CUDAHooks : at::CUDAHooksInterface {
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  // The CPU's random numbers, so that a seed gives both devices the same weights.
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return at::detail::getDefaultCPUGenerator();
  }
  at::Allocator* getPinnedMemoryAllocator() const override { return c10::GetCPUAllocator(); }
};

namespace at {
using ::CUDAHooks;
REGISTER_CUDA_HOOKS(CUDAHooks)
}  // namespace at

namespace {

// ---- Operators: the CPU's, on the same bytes ----

// A storage of the other device on the bytes of `storage`, which it keeps alive.
c10::Storage twin_storage(const c10::Storage& storage, c10::Device device) {
  auto* owner = new c10::Storage(storage);
  auto free_owner = [](void* pointer) { delete static_cast<c10::Storage*>(pointer); };
  c10::DataPtr bytes(const_cast<void*>(storage.data()), owner, free_owner, device);
  bool resizable = device.is_cpu();  // for out=: a CPU kernel may want more room
  auto* allocator = resizable ? c10::GetCPUAllocator() : nullptr;
  return c10::Storage(
      c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(bytes), allocator, resizable);
}

// The tensors of one operator's call, each as the other device sees it.
class Call {
 public:
  at::Tensor to_cpu(const at::Tensor& tensor) {
    if (!tensor.defined() || !tensor.is_cuda()) return tensor;
    for (auto& [on_gpu, on_cpu] : tensors_)
      if (on_gpu.is_same(tensor)) return on_cpu;
    auto twin = make_twin(tensor, cpu_storage(tensor.storage()), c10::DispatchKey::CPU);
    tensors_.emplace_back(tensor, twin);
    return twin;
  }

  at::Tensor to_gpu(const at::Tensor& tensor) {
    if (!tensor.defined() || !tensor.is_cpu()) return tensor;
    for (auto& [on_gpu, on_cpu] : tensors_)
      if (on_cpu.is_same(tensor)) return on_gpu;  // in place, or out=
    return make_twin(tensor, gpu_storage(tensor.storage()), c10::DispatchKey::CUDA);
  }

  c10::Storage cpu_storage(const c10::Storage& storage) {
    if (storage.device().is_cpu()) return storage;
    for (auto& [on_gpu, on_cpu] : storages_)
      if (on_gpu.is_alias_of(storage)) return on_cpu;
    storages_.emplace_back(storage, twin_storage(storage, c10::Device(c10::kCPU)));
    return storages_.back().second;
  }

  // What the call has resized or given other memory, as out= and set_ do.
  void update_arguments() {
    for (auto& [on_gpu, on_cpu] : tensors_) {
      auto* impl = on_gpu.unsafeGetTensorImpl();
      const auto& before = on_gpu.storage();
      const auto& after = on_cpu.storage();
      if (before.data() != after.data() || before.nbytes() != after.nbytes())
        impl->set_storage_keep_dtype(gpu_storage(after));
      if (on_gpu.sizes() != on_cpu.sizes() || on_gpu.strides() != on_cpu.strides() ||
          on_gpu.storage_offset() != on_cpu.storage_offset())
        impl->set_sizes_and_strides(on_cpu.sizes(), on_cpu.strides(), on_cpu.storage_offset());
    }
  }

 private:
  static at::Tensor make_twin(const at::Tensor& like, c10::Storage storage, c10::DispatchKey key) {
    auto twin = at::detail::make_tensor<c10::TensorImpl>(
        std::move(storage), c10::DispatchKeySet(key), like.dtype());
    auto* impl = twin.unsafeGetTensorImpl();
    impl->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
    if (like.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
    return twin;
  }

  c10::Storage gpu_storage(const c10::Storage& storage) {  // of a view: its base's own
    for (auto& [on_gpu, on_cpu] : storages_)
      if (on_cpu.is_alias_of(storage) && on_gpu.data() == storage.data()) return on_gpu;
    return twin_storage(storage, gpu);
  }

  std::vector<std::pair<at::Tensor, at::Tensor>> tensors_;    // on the GPU, on the CPU
  std::vector<std::pair<c10::Storage, c10::Storage>> storages_;  // the same
};

// Puts convert(tensor) in the place of a tensor, or of each in a list.
template <class Convert>
void convert_tensors(c10::IValue& value, Convert convert) {
  if (value.isTensor()) {
    value = convert(value.toTensor());
  } else if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(convert(tensor));
    value = list;
  } else if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector())
      list.push_back(tensor ? std::optional(convert(*tensor)) : tensor);
    value = list;
  }
}

void run_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const size_t first = stack->size() - schema.arguments().size();
  Call call;
  bool result_on_cpu = false;
  for (size_t i = first; i < stack->size(); ++i) {
    c10::IValue& value = (*stack)[i];
    convert_tensors(value, [&](const at::Tensor& tensor) { return call.to_cpu(tensor); });
    if (value.isStorage()) {
      value = call.cpu_storage(value.toStorage());
    } else if (value.isDevice()) {
      result_on_cpu = value.toDevice().is_cpu();
      value = c10::Device(c10::kCPU);
    } else if (schema.arguments()[i - first].name() == "pin_memory") {
      value = c10::IValue();  // it would ask for CUDA again
    }
  }
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  call.update_arguments();
  if (result_on_cpu) return;
  for (size_t i = stack->size() - schema.returns().size(); i < stack->size(); ++i)
    convert_tensors((*stack)[i], [&](const at::Tensor& tensor) { return call.to_gpu(tensor); });
}

torch::CppFunction host_kernel() {
  return torch::CppFunction::makeFromBoxedFunction<&run_on_host>();
}

}  // namespace

TORCH_LIBRARY_IMPL(_, CUDA, library) { library.fallback(host_kernel()); }

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("copy_", host_kernel());  // its one kernel for all devices asks for CUDA's stub
}

// A torch that was built without CUDA cannot be asked about CUDA devices. What autograd and the dispatcher ask for when
// they meet a fake CUDA tensor is answered here: one device, whose streams and events do nothing. Loaded before torch
// first asks, for it remembers the answer. A torch that was built with CUDA has answers of its own, which fail without a
// driver: the hooks here have a higher priority than those, and `take_guard` puts the guard in the place of torch's once
// torch has been imported.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::Stream;

const Device kOnly(c10::DeviceType::CUDA, 0);

struct NoDeviceGuard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kOnly.type(); }
  DeviceIndex deviceCount() const noexcept override { return 1; }
  Device getDevice() const override { return kOnly; }
  Device exchangeDevice(Device) const override { return kOnly; }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  Stream getStream(Device) const override { return Stream(Stream::DEFAULT, kOnly); }
  Stream getDefaultStream(Device) const override { return Stream(Stream::DEFAULT, kOnly); }
  Stream getStreamFromGlobalPool(Device, bool) const override { return Stream(Stream::DEFAULT, kOnly); }
  Stream getNewStream(Device, int) const override { return Stream(Stream::DEFAULT, kOnly); }
  Stream exchangeStream(Stream stream) const override { return stream; }
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}
  void record(void**, const Stream&, const DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
};

}  // namespace

extern "C" void take_guard() {
  static const c10::impl::DeviceGuardImplRegistrar registrar(c10::DeviceType::CUDA, new NoDeviceGuard());
}

// torch looks for a class of this very name.
struct CUDAHooks final : at::CUDAHooksInterface {
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  long versionRuntimeCuDNN() const override { return 90000; }
};

namespace at {
C10_REGISTER_CLASS_WITH_PRIORITY(CUDAHooksRegistry, CUDAHooks, c10::REGISTRY_PREFERRED, CUDAHooks)
}

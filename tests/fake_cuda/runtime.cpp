// A CUDA runtime, driver and cuBLAS without a GPU: device memory is host memory, streams are in order with the host,
// and kernels do nothing. Functions that are not here are stubs that return success (build.py).
//
//   FAKE_CUDA_GPUS      number of devices, 1 unless set; each says that it is an H200
//   FAKE_CUDA_MAJOR     their compute capability, 9 for 9.0 unless set
//   FAKE_CUDA_VALUES    set: kernels.py computes values, so all memory is written, and a launch is an error; unset: large
//                       blocks are not touched, and models that do not fit on this machine run for their control flow,
//                       memory and host time
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#include <map>
#include <mutex>

namespace {
constexpr size_t TOTAL = 141ull << 30, GRANULARITY = 2 << 20, LARGE = 1 << 20;
std::mutex mutex_;
std::map<size_t, size_t> device_blocks, pinned_blocks;  // first address -> bytes
size_t used = 0, last_handle = 0x1000;
thread_local int current_device = 0;

int num_devices() {
  const char* number = getenv("FAKE_CUDA_GPUS");
  return number ? atoi(number) : 1;
}

const bool has_values = getenv("FAKE_CUDA_VALUES") != nullptr;
thread_local cudaError_t last_error = cudaSuccess;

int major() {
  const char* number = getenv("FAKE_CUDA_MAJOR");
  return number ? atoi(number) : 9;
}

bool is_touched(size_t bytes) { return has_values || bytes < LARGE; }

// With values every operator runs in kernels.py, so what launches a kernel here would leave its output unwritten.
cudaError_t launch() { return last_error = has_values ? cudaErrorNotSupported : cudaSuccess; }

template <class Handle>
void create(Handle* handle) {
  std::lock_guard<std::mutex> guard(mutex_);
  *handle = (Handle)(last_handle += 16);
}

void* map_memory(size_t bytes, int protection) {
  void* address = mmap(nullptr, bytes, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return address == MAP_FAILED ? nullptr : address;
}

bool contains(const std::map<size_t, size_t>& blocks, const void* pointer) {
  std::lock_guard<std::mutex> guard(mutex_);
  auto after = blocks.upper_bound((size_t)pointer);
  return after != blocks.begin() && (--after, (size_t)pointer < after->first + after->second);
}

bool reserve(size_t bytes) {
  std::lock_guard<std::mutex> guard(mutex_);
  if (used + bytes > TOTAL) return false;
  used += bytes;
  return true;
}

void release(size_t begin, size_t end) {
  std::lock_guard<std::mutex> guard(mutex_);
  for (auto block = device_blocks.lower_bound(begin); block != device_blocks.end() && block->first < end;) {
    used -= block->second;
    block = device_blocks.erase(block);
  }
}

void add(std::map<size_t, size_t>& blocks, const void* pointer, size_t bytes) {
  std::lock_guard<std::mutex> guard(mutex_);
  blocks[(size_t)pointer] = bytes;
}

int attribute(int which) {  // cudaDeviceAttr and CUdevice_attribute have the same numbers
  switch (which) {
    case cudaDevAttrComputeCapabilityMajor: return major();
    case cudaDevAttrMaxThreadsPerBlock: case cudaDevAttrMaxBlockDimX: case cudaDevAttrMaxBlockDimY: return 1024;
    case cudaDevAttrMaxBlockDimZ: return 64;
    case cudaDevAttrMaxGridDimX: return 2147483647;
    case cudaDevAttrMaxGridDimY: case cudaDevAttrMaxGridDimZ: return 65535;
    case cudaDevAttrMaxSharedMemoryPerBlock: return 49152;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: return 232448;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: return 233472;
    case cudaDevAttrMaxRegistersPerBlock: case cudaDevAttrMaxRegistersPerMultiprocessor: return 65536;
    case cudaDevAttrMaxThreadsPerMultiProcessor: return 2048;
    case cudaDevAttrMultiProcessorCount: return 132;
    case cudaDevAttrWarpSize: return 32;
    case cudaDevAttrClockRate: return 1980000;
    case cudaDevAttrMemoryClockRate: return 3201000;
    case cudaDevAttrGlobalMemoryBusWidth: return 6144;
    case cudaDevAttrL2CacheSize: return 62914560;
    case cudaDevAttrUnifiedAddressing: case CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED: return 1;
    default: return 0;
  }
}

double milliseconds() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1e3 + now.tv_nsec * 1e-6;
}

struct Event { double recorded_at; };
struct LaunchConfig { dim3 grid, block; size_t shared_bytes; void* stream; };
thread_local LaunchConfig launch_config;
CUresult succeed() { return CUDA_SUCCESS; }
}  // namespace

extern "C" {
// devices
cudaError_t cudaGetDeviceCount(int* count) { *count = num_devices(); return cudaSuccess; }
cudaError_t cudaGetDevice(int* device) { *device = current_device; return cudaSuccess; }
cudaError_t cudaSetDevice(int device) { current_device = device; return cudaSuccess; }
cudaError_t cudaDriverGetVersion(int* version) { *version = CUDART_VERSION; return cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int* version) { *version = CUDART_VERSION; return cudaSuccess; }
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr which, int) { *value = attribute(which); return cudaSuccess; }
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int) {
  memset(p, 0, sizeof *p);
  strcpy(p->name, "NVIDIA H200 (fake)");
  p->major = major(), p->pciBusID = 1, p->multiProcessorCount = 132, p->warpSize = 32, p->totalGlobalMem = TOTAL;
  p->maxThreadsPerBlock = p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024, p->maxThreadsDim[2] = 64;
  p->maxGridSize[0] = 2147483647, p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  p->maxThreadsPerMultiProcessor = 2048, p->maxBlocksPerMultiProcessor = 32;
  p->regsPerBlock = p->regsPerMultiprocessor = 65536, p->l2CacheSize = 62914560, p->memoryBusWidth = 6144;
  p->sharedMemPerBlock = 49152, p->sharedMemPerBlockOptin = 232448, p->sharedMemPerMultiprocessor = 233472;
  p->reservedSharedMemPerBlock = 1024, p->unifiedAddressing = p->concurrentKernels = 1;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetPCIBusId(char* text, int size, int) { strncpy(text, "0000:01:00.0", size); return cudaSuccess; }
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* most) { *least = 0, *most = -5; return cudaSuccess; }
cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) { *can = 1; return cudaSuccess; }
const char* cudaGetErrorName(cudaError_t error) {
  return error == cudaErrorMemoryAllocation ? "out of memory"
       : error == cudaErrorNotSupported ? "a kernel without values on a fake GPU" : "fake";
}
const char* cudaGetErrorString(cudaError_t error) { return cudaGetErrorName(error); }

// memory
cudaError_t cudaMalloc(void** pointer, size_t bytes) {
  bytes = (bytes + GRANULARITY - 1) / GRANULARITY * GRANULARITY;
  *pointer = nullptr;
  if (bytes == 0) return cudaSuccess;
  if (!reserve(bytes)) return cudaErrorMemoryAllocation;
  add(device_blocks, *pointer = map_memory(bytes, PROT_READ | PROT_WRITE), bytes);
  return *pointer ? cudaSuccess : cudaErrorMemoryAllocation;
}
cudaError_t cudaFree(void* pointer) {
  auto block = device_blocks.find((size_t)pointer);
  if (block == device_blocks.end()) return cudaSuccess;
  munmap(pointer, block->second);
  release((size_t)pointer, (size_t)pointer + 1);
  return cudaSuccess;
}
cudaError_t cudaHostAlloc(void** pointer, size_t bytes, unsigned) {
  if (posix_memalign(pointer, 4096, bytes ? bytes : 1)) return cudaErrorMemoryAllocation;
  add(pinned_blocks, *pointer, bytes);
  return cudaSuccess;
}
cudaError_t cudaHostRegister(void* pointer, size_t bytes, unsigned) { add(pinned_blocks, pointer, bytes); return cudaSuccess; }
cudaError_t cudaHostUnregister(void* pointer) {
  std::lock_guard<std::mutex> guard(mutex_);
  pinned_blocks.erase((size_t)pointer);
  return cudaSuccess;
}
cudaError_t cudaFreeHost(void* pointer) { cudaHostUnregister(pointer); free(pointer); return cudaSuccess; }
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* a, const void* pointer) {
  memset(a, 0, sizeof *a);
  a->device = current_device, a->devicePointer = a->hostPointer = (void*)pointer;
  a->type = contains(device_blocks, pointer)   ? cudaMemoryTypeDevice
            : contains(pinned_blocks, pointer) ? cudaMemoryTypeHost
                                               : cudaMemoryTypeUnregistered;
  return cudaSuccess;
}
cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* total) { *free_bytes = TOTAL - used, *total = TOTAL; return cudaSuccess; }
cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
  if (is_touched(bytes)) memmove(to, from, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind, cudaStream_t) {
  return cudaMemcpy(to, from, bytes, kind);
}
cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t bytes, cudaStream_t) {
  return cudaMemcpy(to, from, bytes, cudaMemcpyDefault);
}
cudaError_t cudaMemset(void* to, int value, size_t bytes) {
  if (is_touched(bytes)) memset(to, value, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t) { return cudaMemset(to, value, bytes); }

// streams and events
cudaError_t cudaStreamCreate(cudaStream_t* stream) { create(stream); return cudaSuccess; }
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) { return cudaStreamCreate(stream); }
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) { return cudaStreamCreate(stream); }
cudaError_t cudaStreamGetPriority(cudaStream_t, int* priority) { *priority = 0; return cudaSuccess; }
cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus* status, unsigned long long* id, cudaGraph_t*,
                                     const cudaGraphNode_t**, const cudaGraphEdgeData**, size_t* count) {
  *status = cudaStreamCaptureStatusNone;
  if (id) *id = 0;
  if (count) *count = 0;
  return cudaSuccess;
}
cudaError_t cudaLaunchHostFunc(cudaStream_t, cudaHostFn_t function, void* data) { function(data); return cudaSuccess; }
cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t function, void* data, unsigned) {
  function(stream, cudaSuccess, data);
  return cudaSuccess;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  *event = (cudaEvent_t) new Event{milliseconds()};
  return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t event) { delete (Event*)event; return cudaSuccess; }
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t) { ((Event*)event)->recorded_at = milliseconds(); return cudaSuccess; }
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) { return cudaEventRecord(event, stream); }
cudaError_t cudaEventElapsedTime(float* result, cudaEvent_t from, cudaEvent_t to) {
  double elapsed = ((Event*)to)->recorded_at - ((Event*)from)->recorded_at;
  *result = elapsed > 1e-3 ? elapsed : 1e-3;
  return cudaSuccess;
}

// launches
void** __cudaRegisterFatBinary(void*) { static void* handle; return &handle; }
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared_bytes, void* stream) {
  launch_config = {grid, block, shared_bytes, stream};
  return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared_bytes, void* stream) {
  *grid = launch_config.grid, *block = launch_config.block, *shared_bytes = launch_config.shared_bytes;
  *(void**)stream = launch_config.stream;
  return cudaSuccess;
}
cudaError_t cudaLaunchKernel(const void*, dim3, dim3, void**, size_t, cudaStream_t) { return launch(); }
cudaError_t __cudaLaunchKernel(cudaKernel_t, dim3, dim3, void**, size_t, cudaStream_t) { return launch(); }
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t*, const void*, void**) { return launch(); }
cudaError_t cudaPeekAtLastError() { return last_error; }
cudaError_t cudaGetLastError() {
  cudaError_t error = last_error;
  last_error = cudaSuccess;
  return error;
}
cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) { *kernel = (cudaKernel_t)function; return cudaSuccess; }
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* a, const void*) {
  memset(a, 0, sizeof *a);
  a->maxThreadsPerBlock = 1024, a->numRegs = 32, a->binaryVersion = a->ptxVersion = 90;
  return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void*, int, size_t) { *blocks = 2; return cudaSuccess; }
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void*, int, size_t, unsigned) {
  *blocks = 2;
  return cudaSuccess;
}
cudaError_t cudaGetSymbolAddress(void** pointer, const void*) { return cudaMalloc(pointer, GRANULARITY); }

// driver: what torch, its allocator's expandable segments and Triton call
CUresult cuDriverGetVersion(int* version) { *version = CUDA_VERSION; return CUDA_SUCCESS; }
CUresult cuDeviceGetCount(int* count) { *count = num_devices(); return CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice* device, int ordinal) { *device = ordinal; return CUDA_SUCCESS; }
CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute which, CUdevice) { *value = attribute(which); return CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxGetState(CUdevice, unsigned* flags, int* active) { *flags = 0, *active = 1; return CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice) { *context = (CUcontext)1; return CUDA_SUCCESS; }
CUresult cuCtxGetCurrent(CUcontext* context) { *context = (CUcontext)1; return CUDA_SUCCESS; }
CUresult cuCtxGetDevice(CUdevice* device) { *device = current_device; return CUDA_SUCCESS; }
CUresult cuGetErrorString(CUresult, const char** text) { *text = "fake"; return CUDA_SUCCESS; }
CUresult cuPointerGetAttribute(void* value, CUpointer_attribute which, CUdeviceptr pointer) {
  if (which == CU_POINTER_ATTRIBUTE_DEVICE_POINTER) *(CUdeviceptr*)value = pointer;
  else *(int*)value = 0;
  return CUDA_SUCCESS;
}
CUresult cuMemGetAllocationGranularity(size_t* bytes, const CUmemAllocationProp*, CUmemAllocationGranularity_flags) {
  *bytes = GRANULARITY;
  return CUDA_SUCCESS;
}
CUresult cuMemAddressReserve(CUdeviceptr* pointer, size_t bytes, size_t, CUdeviceptr, unsigned long long) {
  *pointer = (CUdeviceptr)map_memory(bytes, PROT_NONE);
  return *pointer ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}
CUresult cuMemAddressFree(CUdeviceptr pointer, size_t bytes) { munmap((void*)pointer, bytes); return CUDA_SUCCESS; }
CUresult cuMemCreate(CUmemGenericAllocationHandle* handle, size_t bytes, const CUmemAllocationProp*, unsigned long long) {
  *handle = bytes;
  return reserve(bytes) ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}
CUresult cuMemMap(CUdeviceptr pointer, size_t bytes, size_t, CUmemGenericAllocationHandle, unsigned long long) {
  mprotect((void*)pointer, bytes, PROT_READ | PROT_WRITE);
  add(device_blocks, (void*)pointer, bytes);
  return CUDA_SUCCESS;
}
CUresult cuMemUnmap(CUdeviceptr pointer, size_t bytes) {
  mmap((void*)pointer, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  release(pointer, pointer + bytes);
  return CUDA_SUCCESS;
}
CUresult cuModuleLoadData(CUmodule* module, const void*) { create(module); return CUDA_SUCCESS; }
CUresult cuModuleLoad(CUmodule* module, const char*) { create(module); return CUDA_SUCCESS; }
CUresult cuModuleGetFunction(CUfunction* function, CUmodule, const char*) { create(function); return CUDA_SUCCESS; }
CUresult cuFuncGetAttribute(int* value, CUfunction_attribute which, CUfunction) {
  *value = which == CU_FUNC_ATTRIBUTE_NUM_REGS ? 64 : which == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
  return CUDA_SUCCESS;
}
CUresult cuOccupancyMaxActiveClusters(int* clusters, CUfunction, const CUlaunchConfig*) { *clusters = 1; return CUDA_SUCCESS; }
CUresult cuGetProcAddress(const char* name, void** function, int, cuuint64_t, CUdriverProcAddressQueryResult* result) {
  *function = dlsym(RTLD_DEFAULT, name);
  if (!*function) *function = (void*)succeed;
  if (result) *result = CU_GET_PROC_ADDRESS_SUCCESS;
  return CUDA_SUCCESS;
}
cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  cuGetProcAddress(name, function, 0, 0, nullptr);
  if (result) *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

// cuBLAS: handles, and one algorithm for every product
int cublasCreate_v2(void** handle) { create(handle); return 0; }
size_t cublasLtGetVersion() { return 10 * CUDA_VERSION; }
int cublasGetPointerMode_v2(void*, int* mode) { *mode = 0; return 0; }
int cublasGetMathMode(void*, int* mode) { *mode = 0; return 0; }
int cublasLtMatmulDescCreate(void** made, int, int) { create(made); return 0; }
int cublasLtMatrixLayoutCreate(void** made, int, uint64_t, uint64_t, int64_t) { create(made); return 0; }
int cublasLtMatmulPreferenceCreate(void** made) { create(made); return 0; }
int cublasLtMatmulAlgoGetHeuristic(void*, void*, void*, void*, void*, void*, void*, int, char* results, int* count) {
  memset(results, 0, 96);  // cublasLtMatmulHeuristicResult_t
  *count = 1;
  return 0;
}
}

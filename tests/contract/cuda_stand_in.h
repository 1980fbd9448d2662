// As much of CUDA as FlashInfer's planner asks for, on a CPU. Memory of the device is
// memory, copies are made at once, and the device is what `played_device` says.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __grid_constant__

enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidValue = 1 };
enum cudaDeviceAttr {
  cudaDevAttrMultiProcessorCount,
  cudaDevAttrComputeCapabilityMajor,
  cudaDevAttrComputeCapabilityMinor,
  cudaDevAttrMaxSharedMemoryPerBlockOptin,
};
enum cudaMemcpyKind { cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost };
using cudaStream_t = void*;

struct int2 {
  int x, y;
};
struct cudaLaunchConfig_t {
  int gridDim, blockDim;
};
struct cudaDeviceProp {
  int multiProcessorCount;
};

struct PlayedDevice {
  int num_sm = 132;
  int blocks_per_sm = 2;
  int major = 9;
  int shared_bytes = 227 << 10;
};
inline PlayedDevice played_device;

inline cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}

inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  switch (attribute) {
    case cudaDevAttrMultiProcessorCount:
      *value = played_device.num_sm;
      return cudaSuccess;
    case cudaDevAttrComputeCapabilityMajor:
      *value = played_device.major;
      return cudaSuccess;
    case cudaDevAttrComputeCapabilityMinor:
      *value = 0;
      return cudaSuccess;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = played_device.shared_bytes;
      return cudaSuccess;
  }
  return cudaErrorInvalidValue;
}

inline cudaError_t cudaGetDeviceProperties(cudaDeviceProp* found, int) {
  found->multiProcessorCount = played_device.num_sm;
  return cudaSuccess;
}

template <typename Kernel>
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, Kernel, int,
                                                          size_t) {
  *blocks = played_device.blocks_per_sm;
  return cudaSuccess;
}

inline cudaError_t cudaOccupancyMaxPotentialClusterSize(int* blocks, const void*,
                                                        const cudaLaunchConfig_t*) {
  *blocks = 1;
  return cudaSuccess;
}

inline cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
  std::memcpy(to, from, bytes);
  return cudaSuccess;
}

inline cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes,
                                   cudaMemcpyKind kind, cudaStream_t) {
  return cudaMemcpy(to, from, bytes, kind);
}

inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline const char* cudaGetErrorString(cudaError_t) { return "refused by the stand-in"; }

// CUDA has them for numbers of two types.
template <typename A, typename B>
constexpr std::common_type_t<A, B> max(A a, B b) {
  return a < b ? b : a;
}
template <typename A, typename B>
constexpr std::common_type_t<A, B> min(A a, B b) {
  return b < a ? b : a;
}

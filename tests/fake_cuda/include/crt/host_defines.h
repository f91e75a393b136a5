// The macros that CUDA's headers take from the compiler package, which the wheels of torch leave out.
#pragma once
#define CUDARTAPI
#define CUDARTAPI_CDECL
#define __align__(n) __attribute__((aligned(n)))
#define __builtin_align__(a) __attribute__((aligned(a)))
#define __cudart_builtin__
#define __device__
#define __device_builtin__
#define __device_builtin_surface_type__
#define __device_builtin_texture_type__
#define __forceinline__ __inline__ __attribute__((always_inline))
#define __grid_constant__
#define __host__
#define __specialization_static

# The kernel families, one object library each with its own flags; KERNELS lists their objects. The native module and
# the sanitizer driver (tests/native) both include this, so that what is examined is what is shipped.
set(QTENSOR_OPTIMISE -O3 CACHE STRING "optimisation of the kernels; the sanitizers take none, which compiles soonest")
set(QTENSOR_EMULATED_OPTIMISE -O1 CACHE STRING "optimisation of the emulated ones, which tests alone run")
option(QTENSOR_GENERIC_ONLY "leave the kernels of particular processors out" OFF)

# One arithmetic on every instruction set: the compiler must neither fuse nor reorder what the source does not.
set(EXACT ${QTENSOR_OPTIMISE} -ffp-contract=off -fno-fast-math -Wall -Wextra -Wno-missing-field-initializers
          -Wno-uninitialized -Wno-maybe-uninitialized)  # gcc 12 warns inside its own intrinsics headers

# Everything is included by its path from here. A header named without a folder (vec16.h, tuning.h, ...) is the family's
# own, so that what stands in kernels/portable and kernels/x86 compiles for each; what AMX lacks is AVX-512's.
include_directories(${CMAKE_CURRENT_LIST_DIR})
set(GENERIC_HEADERS ${CMAKE_CURRENT_LIST_DIR}/kernels/generic)
set(AVX2_HEADERS ${CMAKE_CURRENT_LIST_DIR}/kernels/avx2)
set(AVX512_HEADERS ${CMAKE_CURRENT_LIST_DIR}/kernels/avx512)
set(AMX_HEADERS ${CMAKE_CURRENT_LIST_DIR}/kernels/amx ${AVX512_HEADERS})

add_library(kernels_generic OBJECT ${CMAKE_CURRENT_LIST_DIR}/kernels/generic/table.cpp)
target_compile_options(kernels_generic PRIVATE ${EXACT})
target_include_directories(kernels_generic PRIVATE ${GENERIC_HEADERS})
set(KERNELS $<TARGET_OBJECTS:kernels_generic>)

if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64" AND NOT QTENSOR_GENERIC_ONLY)
  set(X86 ON)
  set(AVX2 -mavx2 -mfma -mf16c)
  set(AVX512 ${AVX2} -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512vnni -mprefer-vector-width=512)
  set(AMX ${AVX512} -mavx512vbmi -mamx-tile -mamx-int8 -mamx-bf16)
  target_compile_definitions(kernels_generic PRIVATE QTENSOR_X86)
  foreach(family amx avx512 avx2)  # what takes longest is begun first
    string(TOUPPER ${family} flags)
    add_library(kernels_${family} OBJECT ${CMAKE_CURRENT_LIST_DIR}/kernels/${family}/table.cpp)
    target_compile_options(kernels_${family} PRIVATE ${EXACT} ${${flags}})
    target_include_directories(kernels_${family} PRIVATE ${${flags}_HEADERS})
    target_compile_definitions(kernels_${family} PRIVATE QTENSOR_X86)
    list(APPEND KERNELS $<TARGET_OBJECTS:kernels_${family}>)
  endforeach()
  # For tests, which a source distribution leaves out: the AMX kernels a second time, on emulated tiles.
  set(EMULATED ${CMAKE_CURRENT_LIST_DIR}/../tests/native/amx_emulated.cpp)
  if(EXISTS ${EMULATED})
    add_library(kernels_amx_emulated OBJECT EXCLUDE_FROM_ALL ${EMULATED})
    target_compile_options(kernels_amx_emulated PRIVATE ${EXACT} ${AVX512} ${QTENSOR_EMULATED_OPTIMISE})
    target_include_directories(kernels_amx_emulated PRIVATE ${AMX_HEADERS})
    target_compile_definitions(kernels_amx_emulated PRIVATE QTENSOR_X86)
  endif()
endif()

# For tests as well: the CUDA kernels as ordinary C++ over emulated warps and blocks.
set(EMULATED_CUDA ${CMAKE_CURRENT_LIST_DIR}/../tests/native/cuda_emulated.cpp)
if(EXISTS ${EMULATED_CUDA})
  add_library(kernels_cuda_emulated OBJECT EXCLUDE_FROM_ALL ${EMULATED_CUDA})
  target_compile_options(kernels_cuda_emulated PRIVATE ${EXACT} -fno-strict-aliasing)  # as CUDA reads words of bytes
  target_include_directories(kernels_cuda_emulated PRIVATE ${CMAKE_CURRENT_LIST_DIR}/../tests/native)
endif()

# What runs the kernels and knows nothing of Python.
set(RUNTIME)
foreach(name kernels/portable/grids ops/attention ops/dequantise ops/matmul ops/rope_table ops/rows runtime/bus_error runtime/cpu_features
             runtime/dispatch runtime/roofline runtime/threads)
  list(APPEND RUNTIME ${CMAKE_CURRENT_LIST_DIR}/${name}.cpp)
endforeach()

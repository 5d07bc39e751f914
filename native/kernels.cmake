# The kernel families, one object library each with its own flags; KERNELS lists their objects. The native module and
# the sanitizer driver (tests/native) both include this, so that what is examined is what is shipped.
set(QTENSOR_OPTIMIZE -O3 CACHE STRING "optimization of the kernels; the sanitizers take none, which compiles soonest")
set(QTENSOR_EMULATED_OPTIMIZE -O1 CACHE STRING "optimization of the emulated ones, which tests alone run")
option(QTENSOR_GENERIC_ONLY "leave the kernels of particular processors out" OFF)

# One arithmetic on every instruction set: the compiler must neither fuse nor reorder what the source does not.
set(EXACT ${QTENSOR_OPTIMIZE} -ffp-contract=off -fno-fast-math -Wall -Wextra -Wno-missing-field-initializers
          -Wno-uninitialized -Wno-maybe-uninitialized)  # gcc 12 warns inside its own intrinsics headers

# Everything is included by its path from here. A header named without a folder (vec16.h, tuning.h, ...) is the family's
# own, so that what stands in kernels/portable and kernels/x86 compiles for each; what AMX lacks is AVX-512's.
include_directories(${CMAKE_CURRENT_LIST_DIR})
set(GENERIC_HEADERS ${CMAKE_CURRENT_LIST_DIR}/kernels/generic)
set(AVX2_HEADERS ${CMAKE_CURRENT_LIST_DIR}/kernels/avx2)
set(AVXVNNI_HEADERS ${AVX2_HEADERS})
set(AVX512_HEADERS ${CMAKE_CURRENT_LIST_DIR}/kernels/avx512)
set(NEON_HEADERS ${CMAKE_CURRENT_LIST_DIR}/kernels/neon)
set(AMX_HEADERS ${CMAKE_CURRENT_LIST_DIR}/kernels/amx ${AVX512_HEADERS})

set(KERNELS)
if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64" AND NOT QTENSOR_GENERIC_ONLY)
  set(X86 ON)
  set(AVX2 -mavx2 -mfma -mf16c)
  set(AVXVNNI ${AVX2} -mavxvnni)
  set(AVX512 ${AVX2} -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512vnni -mprefer-vector-width=512)
  set(AMX ${AVX512} -mavx512vbmi -mamx-tile -mamx-int8 -mamx-bf16)
  foreach(family amx avx512 avxvnni avx2)  # what takes longest is begun first
    string(TOUPPER ${family} flags)
    list(GET ${flags}_HEADERS 0 folder)
    file(GLOB sources CONFIGURE_DEPENDS ${folder}/*.cpp)
    list(REVERSE sources)  # of AMX the longest comes first
    add_library(kernels_${family} OBJECT ${sources})
    target_compile_options(kernels_${family} PRIVATE ${EXACT} ${${flags}})
    target_include_directories(kernels_${family} PRIVATE ${${flags}_HEADERS})
    target_compile_definitions(kernels_${family} PRIVATE QTENSOR_X86)
    list(APPEND KERNELS $<TARGET_OBJECTS:kernels_${family}>)
  endforeach()
  # For tests, which a source distribution leaves out: the AMX kernels a second time, on emulated tiles.
  set(EMULATED ${CMAKE_CURRENT_LIST_DIR}/../tests/native/amx_emulated.cpp)
  if(EXISTS ${EMULATED})
    add_library(kernels_amx_emulated OBJECT EXCLUDE_FROM_ALL ${EMULATED})
    target_compile_options(kernels_amx_emulated PRIVATE ${EXACT} ${AVX512} ${QTENSOR_EMULATED_OPTIMIZE})
    target_include_directories(kernels_amx_emulated PRIVATE ${AMX_HEADERS})
    target_compile_definitions(kernels_amx_emulated PRIVATE QTENSOR_X86)
  endif()
endif()

if(CMAKE_SYSTEM_PROCESSOR MATCHES "aarch64|arm64|ARM64" AND NOT QTENSOR_GENERIC_ONLY)
  set(ARM64 ON)
  set(NEON -march=armv8.2-a+dotprod)
  set(NEON_I8MM -march=armv8.2-a+dotprod+i8mm)
  foreach(family neon neon_i8mm)  # one source: what i8mm adds, its header asks for
    string(TOUPPER ${family} flags)
    add_library(kernels_${family} OBJECT ${CMAKE_CURRENT_LIST_DIR}/kernels/neon/table.cpp)
    target_compile_options(kernels_${family} PRIVATE ${EXACT} ${${flags}})
    target_include_directories(kernels_${family} PRIVATE ${NEON_HEADERS})
    target_compile_definitions(kernels_${family} PRIVATE QTENSOR_ARM64)
    list(APPEND KERNELS $<TARGET_OBJECTS:kernels_${family}>)
  endforeach()
endif()

# After those that take longer.
add_library(kernels_generic OBJECT ${CMAKE_CURRENT_LIST_DIR}/kernels/generic/table.cpp)
target_compile_options(kernels_generic PRIVATE ${EXACT})
target_include_directories(kernels_generic PRIVATE ${GENERIC_HEADERS})
if(X86)
  target_compile_definitions(kernels_generic PRIVATE QTENSOR_X86)
endif()
list(APPEND KERNELS $<TARGET_OBJECTS:kernels_generic>)

# For tests as well: the CUDA kernels as ordinary C++ over emulated warps and blocks.
set(EMULATED_CUDA ${CMAKE_CURRENT_LIST_DIR}/../tests/native/cuda_emulated.cpp)
if(EXISTS ${EMULATED_CUDA})
  add_library(kernels_cuda_emulated OBJECT EXCLUDE_FROM_ALL ${EMULATED_CUDA})
  target_compile_options(kernels_cuda_emulated PRIVATE ${EXACT} -fno-strict-aliasing)  # as CUDA reads words of bytes
  target_include_directories(kernels_cuda_emulated PRIVATE ${CMAKE_CURRENT_LIST_DIR}/../tests/native)
  target_compile_definitions(kernels_cuda_emulated PRIVATE QTENSOR_EMULATED_LANES)
  # And a GPU's driver over the same: what stands in cuda/ runs on it as on libcuda.so.1.
  add_library(stub_driver MODULE EXCLUDE_FROM_ALL ${CMAKE_CURRENT_LIST_DIR}/../tests/native/stub_driver.cpp)
  target_compile_options(stub_driver PRIVATE ${EXACT} -fno-strict-aliasing)
  target_include_directories(stub_driver PRIVATE ${CMAKE_CURRENT_LIST_DIR}/../tests/native)
  target_compile_definitions(stub_driver PRIVATE QTENSOR_EMULATED_LANES)
  set_target_properties(stub_driver PROPERTIES PREFIX "" OUTPUT_NAME stub_driver)
endif()

# What runs the kernels and knows nothing of Python.
set(RUNTIME)
foreach(name cuda/device cuda/driver_api cuda/machine_code cuda/operations kernels/portable/grids ops/attention
             ops/dequantize ops/matmul ops/packing ops/rope_table ops/rows runtime/bus_error runtime/cpu_features runtime/dispatch
             runtime/roofline runtime/threads)
  list(APPEND RUNTIME ${CMAKE_CURRENT_LIST_DIR}/${name}.cpp)
endforeach()
# These read the kernels' headers, which write words of bytes.
set_source_files_properties(${CMAKE_CURRENT_LIST_DIR}/cuda/device.cpp ${CMAKE_CURRENT_LIST_DIR}/cuda/operations.cpp
                            ${CMAKE_CURRENT_LIST_DIR}/bindings/cuda.cpp PROPERTIES COMPILE_OPTIONS -fno-strict-aliasing)

# Machine code of the CUDA kernels, where nvcc is: for every architecture that has what they ask for, and for later ones
# as text that the driver compiles. Without it the build works, and says that it has none.
set(QTENSOR_CUDA AUTO CACHE STRING "machine code for GPUs: AUTO (where nvcc is found), ON or OFF")
set(CUDA_ARCHITECTURES 80 86 89 90 100 120)
if(NOT QTENSOR_CUDA STREQUAL "OFF")
  find_program(NVCC nvcc PATHS /usr/local/cuda/bin ENV CUDA_HOME PATH_SUFFIXES bin)
  if(NOT NVCC AND QTENSOR_CUDA STREQUAL "ON")
    message(FATAL_ERROR "QTENSOR_CUDA=ON needs nvcc")
  endif()
endif()
if(NVCC)
  execute_process(COMMAND ${NVCC} --version OUTPUT_VARIABLE NVCC_SAYS ERROR_QUIET)
  if(NVCC_SAYS MATCHES "release ([0-9]+)\\.([0-9]+)")
    math(EXPR CUDA_TOOLKIT "${CMAKE_MATCH_1} * 1000 + ${CMAKE_MATCH_2} * 10")
    math(EXPR CUDA_DRIVER "${CMAKE_MATCH_1} * 1000")  # within a major version older drivers load newer code
  endif()
endif()
if(NVCC AND CUDA_TOOLKIT GREATER_EQUAL 12080)
  set(CUDA_FILE ${CMAKE_BINARY_DIR}/cuda_kernels.fatbin)
  set(CUDA_CODE -gencode arch=compute_80,code=compute_80)
  foreach(architecture ${CUDA_ARCHITECTURES})
    list(APPEND CUDA_CODE -gencode arch=compute_${architecture},code=sm_${architecture})
  endforeach()
  file(GLOB CUDA_SOURCES CONFIGURE_DEPENDS ${CMAKE_CURRENT_LIST_DIR}/cuda/*.h)
  add_custom_command(
    OUTPUT ${CUDA_FILE}
    COMMAND ${NVCC} -fatbin -O3 -fmad=false -std=c++20 --expt-relaxed-constexpr --compress-mode=size --threads 0
            ${CUDA_CODE} -I${CMAKE_CURRENT_LIST_DIR} ${CMAKE_CURRENT_LIST_DIR}/cuda/kernels.cu -o ${CUDA_FILE}
    DEPENDS ${CMAKE_CURRENT_LIST_DIR}/cuda/kernels.cu ${CUDA_SOURCES}
    VERBATIM)
  string(JOIN " " CUDA_NAMES ${CUDA_ARCHITECTURES})
  set_source_files_properties(
    ${CMAKE_CURRENT_LIST_DIR}/cuda/machine_code.cpp
    PROPERTIES COMPILE_DEFINITIONS
               "QTENSOR_CUDA_FILE=\"${CUDA_FILE}\";QTENSOR_CUDA_TOOLKIT=${CUDA_DRIVER};QTENSOR_CUDA_ARCHITECTURES=\"${CUDA_NAMES}\""
               OBJECT_DEPENDS ${CUDA_FILE})
  add_custom_target(cuda_code DEPENDS ${CUDA_FILE})  # of the module it would wait for all kernels, and all else for it
endif()

# The kernel families. Each is an object library with its own flags; KERNELS lists the objects. The native module and
# the sanitizer driver (tests/native) both include this file, so that the tested code is the code of releases.
set(QTENSOR_OPTIMIZE -O3 CACHE STRING "optimization flag of the kernels; sanitizers use -O0, to compile faster")
set(QTENSOR_EMULATED_OPTIMIZE -O1 CACHE STRING "optimization flag of the emulated kernels, which only tests run")
option(QTENSOR_GENERIC_ONLY "omit the kernels for specific processors" OFF)

# Results must be the same on every instruction set, so the compiler must not fuse or reorder float operations.
set(EXACT ${QTENSOR_OPTIMIZE} -ffp-contract=off -fno-fast-math -Wall -Wextra -Wno-missing-field-initializers
          -Wno-uninitialized -Wno-maybe-uninitialized)  # gcc 12 warns inside its own intrinsics headers

# Headers are included by their path relative to this folder. A header included without a folder (vec16.h, tuning.h and
# others) is that of the family, so that kernels/portable and kernels/x86 can be compiled for each family. AMX uses the
# headers of AVX-512 if it has none of its own.
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
  foreach(family amx avx512 avxvnni avx2)  # the slowest to compile are first
    string(TOUPPER ${family} flags)
    list(GET ${flags}_HEADERS 0 folder)
    file(GLOB sources CONFIGURE_DEPENDS ${folder}/*.cpp)
    list(REVERSE sources)  # the slowest file of AMX is then first
    add_library(kernels_${family} OBJECT ${sources})
    target_compile_options(kernels_${family} PRIVATE ${EXACT} ${${flags}})
    target_include_directories(kernels_${family} PRIVATE ${${flags}_HEADERS})
    target_compile_definitions(kernels_${family} PRIVATE QTENSOR_X86)
    list(APPEND KERNELS $<TARGET_OBJECTS:kernels_${family}>)
  endforeach()
  # For tests, which a source distribution does not contain: the AMX kernels a second time, with emulated tiles.
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
  foreach(family neon neon_i8mm)  # one source, which tests whether i8mm is available
    string(TOUPPER ${family} flags)
    add_library(kernels_${family} OBJECT ${CMAKE_CURRENT_LIST_DIR}/kernels/neon/table.cpp)
    target_compile_options(kernels_${family} PRIVATE ${EXACT} ${${flags}})
    target_include_directories(kernels_${family} PRIVATE ${NEON_HEADERS})
    target_compile_definitions(kernels_${family} PRIVATE QTENSOR_ARM64)
    list(APPEND KERNELS $<TARGET_OBJECTS:kernels_${family}>)
  endforeach()
endif()

# After the families that take longer to compile.
add_library(kernels_generic OBJECT ${CMAKE_CURRENT_LIST_DIR}/kernels/generic/table.cpp)
target_compile_options(kernels_generic PRIVATE ${EXACT})
target_include_directories(kernels_generic PRIVATE ${GENERIC_HEADERS})
if(X86)
  target_compile_definitions(kernels_generic PRIVATE QTENSOR_X86)
endif()
list(APPEND KERNELS $<TARGET_OBJECTS:kernels_generic>)

# Also for tests: the CUDA kernels as ordinary C++ with emulated warps and thread blocks.
set(EMULATED_CUDA ${CMAKE_CURRENT_LIST_DIR}/../tests/native/cuda_emulated.cpp)
if(EXISTS ${EMULATED_CUDA})
  add_library(kernels_cuda_emulated OBJECT EXCLUDE_FROM_ALL ${EMULATED_CUDA})
  target_compile_options(kernels_cuda_emulated PRIVATE ${EXACT} -fno-strict-aliasing)  # CUDA reads bytes as words
  target_include_directories(kernels_cuda_emulated PRIVATE ${CMAKE_CURRENT_LIST_DIR}/../tests/native)
  target_compile_definitions(kernels_cuda_emulated PRIVATE QTENSOR_EMULATED_LANES)
  # A GPU driver on this emulation, which the code in cuda/ uses like libcuda.so.1.
  add_library(stub_driver MODULE EXCLUDE_FROM_ALL ${CMAKE_CURRENT_LIST_DIR}/../tests/native/stub_driver.cpp)
  target_compile_options(stub_driver PRIVATE ${EXACT} -fno-strict-aliasing ${QTENSOR_EMULATED_OPTIMIZE})
  target_include_directories(stub_driver PRIVATE ${CMAKE_CURRENT_LIST_DIR}/../tests/native)
  target_compile_definitions(stub_driver PRIVATE QTENSOR_EMULATED_LANES)
  set_target_properties(stub_driver PROPERTIES PREFIX "" OUTPUT_NAME stub_driver)
endif()

# The code that runs the kernels, independent of Python.
set(RUNTIME)
foreach(name cuda/device cuda/driver_api cuda/machine_code cuda/operations kernels/portable/grids ops/attention
             ops/dequantize ops/matmul ops/packing ops/rope_table ops/rows runtime/bus_error runtime/cpu_features runtime/dispatch
             runtime/roofline runtime/threads)
  list(APPEND RUNTIME ${CMAKE_CURRENT_LIST_DIR}/${name}.cpp)
endforeach()
# These files include headers of the kernels, which access bytes as words.
set_source_files_properties(${CMAKE_CURRENT_LIST_DIR}/cuda/device.cpp ${CMAKE_CURRENT_LIST_DIR}/cuda/operations.cpp
                            ${CMAKE_CURRENT_LIST_DIR}/bindings/cuda.cpp PROPERTIES COMPILE_OPTIONS -fno-strict-aliasing)

# Machine code of the CUDA kernels, if nvcc is found: for every architecture that has the required instructions, and as
# PTX, which the driver compiles for later architectures. Without nvcc, the build contains no machine code for GPUs.
set(QTENSOR_CUDA AUTO CACHE STRING "machine code for GPUs: AUTO (if nvcc is found), ON or OFF")
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
    math(EXPR CUDA_DRIVER "${CMAKE_MATCH_1} * 1000")  # older drivers of the same major version can load newer code
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
  add_custom_target(cuda_code DEPENDS ${CUDA_FILE})  # separate, to compile in parallel with the module
endif()

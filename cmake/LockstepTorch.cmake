# Defines lockstep_torch, the CPU parts of a LibTorch.
find_path(LOCKSTEP_TORCH_ROOT share/cmake/Torch/TorchConfig.cmake REQUIRED)
add_library(lockstep_torch INTERFACE)
target_include_directories(lockstep_torch SYSTEM INTERFACE
  ${LOCKSTEP_TORCH_ROOT}/include ${LOCKSTEP_TORCH_ROOT}/include/torch/csrc/api/include)
target_link_directories(lockstep_torch INTERFACE ${LOCKSTEP_TORCH_ROOT}/lib)
target_link_options(lockstep_torch INTERFACE -Wl,-rpath,${LOCKSTEP_TORCH_ROOT}/lib -Wl,--allow-shlib-undefined)
target_link_libraries(lockstep_torch INTERFACE torch_cpu c10)

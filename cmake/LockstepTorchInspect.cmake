# Looks at a folder that may hold a LibTorch, and makes a target of it.
include_guard(GLOBAL)

# Sets <out>_FOUND where ROOT holds LibTorch's headers, <out>_PROBLEM to the reason why it cannot serve (or to
# nothing; with LOCKSTEP_CUDA_WANTED a CPU build cannot), and <out>_ROOT, _VERSION, _INCLUDE, _LIBRARY (libtorch_cpu.so), _C10 and _ABI.
function(lockstep_torch_inspect root out)
  set(${out}_FOUND FALSE PARENT_SCOPE)
  get_filename_component(root "${root}" REALPATH)
  set(include ${root}/include)
  # The numbers stand in torch/version.h up to 2.9 or so, later in torch/headeronly/version.h.
  set(numbers)
  foreach(header IN ITEMS torch/headeronly/version.h torch/csrc/api/include/torch/version.h)
    if(NOT numbers AND EXISTS ${include}/${header})
      file(STRINGS ${include}/${header} numbers REGEX "define TORCH_VERSION_(MAJOR|MINOR|PATCH) +[0-9]+")
    endif()
  endforeach()
  if(NOT numbers)
    return()
  endif()
  string(REGEX REPLACE "[^0-9;]" "" numbers "${numbers}")
  list(JOIN numbers "." version)

  set(problem "")
  set(library)
  set(c10)
  foreach(folder IN ITEMS lib/${CMAKE_LIBRARY_ARCHITECTURE} lib lib64)
    if(NOT library AND EXISTS ${root}/${folder}/libtorch_cpu.so)
      set(library ${root}/${folder}/libtorch_cpu.so)
      set(c10 ${root}/${folder}/libc10.so)
    endif()
  endforeach()
  if(version VERSION_LESS LOCKSTEP_TORCH_OLDEST)
    set(problem "LibTorch ${version} in ${root} is too old, lockstep needs ${LOCKSTEP_TORCH_OLDEST} or newer")
  elseif(NOT library AND EXISTS ${root}/lib/libtorch_cpu.a)
    set(problem "LibTorch ${version} in ${root} is a static library; lockstep needs the shared one")
  elseif(NOT library OR NOT EXISTS ${c10})
    set(problem "LibTorch ${version} in ${root} has no libtorch_cpu.so and libc10.so")
  elseif(NOT EXISTS ${include}/torch/csrc/distributed/c10d/ProcessGroupGloo.hpp)
    set(problem "LibTorch ${version} in ${root} was built without torch.distributed (USE_DISTRIBUTED)")
  elseif(LOCKSTEP_CUDA_WANTED)
    get_filename_component(folder ${library} DIRECTORY)
    if(NOT EXISTS ${folder}/libtorch_cuda.so)
      set(problem "LibTorch ${version} in ${root} has no CUDA part (libtorch_cuda.so), which is asked for; the torch \
package of `pip install torch` has one")
    endif()
  endif()

  # Wheels and zips before 2.7 may have std::string in the ABI from before C++11; they say so here.
  set(abi "")
  foreach(config IN ITEMS ${root}/share/cmake/Torch/TorchConfig.cmake
      ${root}/lib/${CMAKE_LIBRARY_ARCHITECTURE}/cmake/Torch/TorchConfig.cmake)
    if(EXISTS ${config})
      file(STRINGS ${config} flags REGEX "_GLIBCXX_USE_CXX11_ABI=[01]")
      if("${flags}" MATCHES "_GLIBCXX_USE_CXX11_ABI=([01])")
        set(abi ${CMAKE_MATCH_1})
      endif()
    endif()
  endforeach()

  set(${out}_FOUND TRUE PARENT_SCOPE)
  set(${out}_PROBLEM "${problem}" PARENT_SCOPE)
  set(${out}_ROOT ${root} PARENT_SCOPE)
  set(${out}_VERSION ${version} PARENT_SCOPE)
  set(${out}_INCLUDE ${include} PARENT_SCOPE)
  set(${out}_LIBRARY "${library}" PARENT_SCOPE)
  set(${out}_C10 "${c10}" PARENT_SCOPE)
  set(${out}_ABI "${abi}" PARENT_SCOPE)
endfunction()

# The imported target `lockstep_torch` of what lockstep_torch_inspect found.
macro(_lockstep_torch_target found)
  add_library(lockstep_torch INTERFACE IMPORTED GLOBAL)
  target_include_directories(lockstep_torch SYSTEM INTERFACE
    ${${found}_INCLUDE} ${${found}_INCLUDE}/torch/csrc/api/include)
  target_link_libraries(lockstep_torch INTERFACE ${${found}_LIBRARY} ${${found}_C10})
  # A CUDA build's libtorch_cpu.so needs libcudart and libcupti, which its own run path finds, and which the linker
  # need not see.
  target_link_options(lockstep_torch INTERFACE LINKER:--allow-shlib-undefined)
  if(NOT "${${found}_ABI}" STREQUAL "")
    target_compile_definitions(lockstep_torch INTERFACE _GLIBCXX_USE_CXX11_ABI=${${found}_ABI})
  endif()
endmacro()

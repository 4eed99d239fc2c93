#pragma once

#include <dlfcn.h>
#include <link.h>
#include <stdlib.h>

#include <algorithm>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/comm/detail/nccl/device.hpp"
#include "lockstep/detail/format.hpp"

namespace lockstep::detail {

/// The NCCL libraries loaded in this process.
struct NcclsFound {
  std::vector<std::string> libraries;  // the files of all loaded libnccl.so
  std::string used;                    // the file that this program's calls resolve to
  std::optional<std::string>
      torch;         // the file that LibTorch's calls resolve to; "" if it is hidden; none without NCCL
  int version = 0;   // of `used`
  int compiled = 0;  // of the header
};

/// Returns why these libraries cannot work together, std::nullopt if they can. Two copies of NCCL do not know
/// of each other's groups and streams. A library older than its header lacks functions that were compiled in.
inline std::optional<std::string> nccl_conflict(const NcclsFound& found) {
  if (found.libraries.size() > 1)
    return detail::formatted(
        "there are two NCCLs in this process, {} and {}: link the one that LibTorch uses alone, "
        "and take the other off LD_LIBRARY_PATH and LD_PRELOAD",
        found.libraries[0], found.libraries[1]);
  if (found.torch && *found.torch != found.used)
    return detail::formatted(
        "there are two NCCLs in this process, LibTorch's in {} and {}: link the one that LibTorch "
        "uses, or none beside a LibTorch that has its own",
        found.torch->empty() ? "libtorch_cuda" : *found.torch, found.used);
  if (found.version < 21800)
    return detail::formatted(
        "the NCCL of {} is {}, and 2.18 is the oldest that NcclComm can use: install a newer torch",
        found.used, version_text(found.version));
  if (found.version < found.compiled)
    return detail::formatted(
        "the NCCL of {} is {}, older than the nccl.h {} that this program was compiled with: run it "
        "with the NCCL it was built for, or build it anew",
        found.used, version_text(found.version), version_text(found.compiled));
  return std::nullopt;
}

/// Returns the files of all libnccl.so that this process has loaded, without duplicates.
inline std::vector<std::string> loaded_nccl_libraries() {
  std::vector<std::string> files;
  dl_iterate_phdr(
      [](dl_phdr_info* object, std::size_t, void* list) {
        const std::string name = object->dlpi_name ? object->dlpi_name : "";
        const auto base = name.substr(name.rfind('/') + 1);
        if (!base.starts_with("libnccl.so")) return 0;
        char* real = realpath(name.c_str(), nullptr);
        auto& files = *static_cast<std::vector<std::string>*>(list);
        const std::string file = real ? real : name;
        if (std::find(files.begin(), files.end(), file) == files.end()) files.push_back(file);
        free(real);
        return 0;
      },
      &files);
  return files;
}

/// Returns the file that contains a function.
inline std::string file_of(const void* function) {
  Dl_info info;
  if (dladdr(function, &info) == 0 || !info.dli_fname) return "this program";
  char* real = realpath(info.dli_fname, nullptr);
  const std::string file = real ? real : info.dli_fname;
  free(real);
  return file;
}

/// Returns the file that LibTorch's NCCL calls resolve to. See NcclsFound::torch.
inline std::optional<std::string> nccl_of_torch() {
  void* torch = dlopen("libtorch_cuda.so", RTLD_NOLOAD | RTLD_LAZY);
  if (!torch) return std::nullopt;
  std::optional<std::string> file;
  // torch::cuda::nccl::version(), present if LibTorch was built with NCCL.
  if (dlsym(torch, "_ZN5torch4cuda4nccl7versionEv")) {
    const void* function = dlsym(torch, "ncclGetVersion");
    file = function ? file_of(function) : "";
  }
  dlclose(torch);
  return file;
}

}  // namespace lockstep::detail

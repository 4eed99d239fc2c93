#pragma once

#include <dirent.h>
#include <sched.h>
#include <sys/types.h>

#include <algorithm>
#include <cstdlib>
#include <string>
#include <string_view>
#include <thread>

namespace lockstep::detail {

/// Returns the number of cores that a process may run on; 0: this process.
inline int usable_cores(pid_t process = 0) {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(process, sizeof set, &set) == 0) return std::max(1, CPU_COUNT(&set));
  return std::max(1u, std::thread::hardware_concurrency());
}

/// Returns the number of directory entries for which `counts` returns true, 0 without such a directory.
template <class Predicate>
int entries_in(const char* path, Predicate counts) {
  int number = 0;
  if (DIR* folder = opendir(path)) {
    while (const dirent* entry = readdir(folder)) number += counts(std::string_view(entry->d_name)) ? 1 : 0;
    closedir(folder);
  }
  return number;
}

/// Returns the number of GPUs that a program started here would see, without using CUDA: the driver's list,
/// or the device files if a container hides that list, limited by CUDA_VISIBLE_DEVICES.
inline int visible_gpus(const char* driver_folder = "/proc/driver/nvidia/gpus",
                        const char* device_folder = "/dev") {
  int present = entries_in(driver_folder, [](std::string_view name) { return !name.starts_with('.'); });
  if (present == 0)
    present = entries_in(device_folder, [](std::string_view name) {
      constexpr std::string_view digits = "0123456789";
      return name.starts_with("nvidia") && name.size() > 6 &&
             name.find_first_not_of(digits, 6) == std::string_view::npos;
    });
  const char* visible = std::getenv("CUDA_VISIBLE_DEVICES");
  if (visible == nullptr || present == 0) return present;
  const std::string list = visible;
  if (list.empty() || list.starts_with("-1") || list == "NoDevFiles") return 0;
  return std::min<int>(present, 1 + static_cast<int>(std::count(list.begin(), list.end(), ',')));
}

}  // namespace lockstep::detail

#pragma once

#include <dirent.h>
#include <sched.h>

#include <algorithm>
#include <cstdlib>
#include <string>
#include <thread>

namespace lockstep::detail {

/// The cores that this process may run on.
inline int usable_cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof set, &set) == 0) return std::max(1, CPU_COUNT(&set));
  return std::max(1u, std::thread::hardware_concurrency());
}

/// The GPUs that a program started here would see, without touching CUDA: the driver's list, narrowed by
/// CUDA_VISIBLE_DEVICES.
inline int visible_gpus(const char* driver_folder = "/proc/driver/nvidia/gpus") {
  int present = 0;
  if (DIR* folder = opendir(driver_folder)) {
    while (const dirent* entry = readdir(folder))
      if (entry->d_name[0] != '.') ++present;
    closedir(folder);
  }
  const char* visible = std::getenv("CUDA_VISIBLE_DEVICES");
  if (visible == nullptr || present == 0) return present;
  const std::string list = visible;
  if (list.empty() || list.starts_with("-1") || list == "NoDevFiles") return 0;
  return std::min<int>(present, 1 + static_cast<int>(std::count(list.begin(), list.end(), ',')));
}

}  // namespace lockstep::detail

// Preloaded into a program: opens the file that LOCKSTEP_TEST_LATE_OPEN names half a second late, as a rank does
// that other work on its host holds up.
#include <dlfcn.h>
#include <fcntl.h>
#include <unistd.h>

#include <cstdarg>
#include <cstdlib>
#include <cstring>

extern "C" int open(const char* path, int flags, ...) {
  va_list more;
  va_start(more, flags);
  const mode_t mode = (flags & O_CREAT) != 0 ? va_arg(more, mode_t) : 0;
  va_end(more);
  if (const char* late = std::getenv("LOCKSTEP_TEST_LATE_OPEN"); late && std::strcmp(late, path) == 0) {
    usleep(500'000);
    constexpr char line[] = "opens late\n";
    if (write(STDERR_FILENO, line, sizeof line - 1) < 0) std::abort();
  }
  using Open = int (*)(const char*, int, ...);
  static const auto next = reinterpret_cast<Open>(dlsym(RTLD_NEXT, "open"));
  return next(path, flags, mode);
}

#pragma once

#include <fcntl.h>
#include <linux/futex.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <climits>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <ctime>
#include <fstream>
#include <limits>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <utility>

#include "lockstep/detail/descriptor.hpp"
#include "lockstep/detail/format.hpp"
#include "lockstep/detail/linkage.hpp"

namespace lockstep::inline v0_1::detail {

/// Why ranks cannot share memory.
struct ShmError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// The words of all ranks, most of which have a bit for each.
struct ShmHead {
  std::atomic<std::uint64_t> sleepers[8];  ///< ranks that sleep: who changes what others wait for wakes them
  std::atomic<std::uint64_t> starved[8];   ///< ranks that sleep until a slot opens
  std::atomic<std::uint64_t> mismatch;     ///< not 0 after ranks have launched different operations
  std::atomic<std::uint64_t> cores[CPU_SETSIZE / 64];  ///< on which the ranks may run
};

/// What the ranks share of one piece of a collective. Piece p uses slot p % slots once `open` is p, and the last rank
/// to take its result opens the slot for piece p + slots.
struct ShmSlot {
  std::atomic<std::uint64_t> open;       ///< the number of the piece
  std::atomic<std::uint64_t> signature;  ///< of the operation, set by the first rank that comes
  std::atomic<std::uint32_t> arrived;  ///< ranks that have launched the piece: its result exists if all have
  std::atomic<std::uint32_t> claimed, reduced;  ///< parts of a sum that some rank computes, or has computed
  std::atomic<std::uint32_t> taken;             ///< ranks that have the result

  /// The block of a rank that holds its input. Written before the rank arrives.
  [[nodiscard]] std::uint16_t& block(int rank) { return reinterpret_cast<std::uint16_t*>(this + 1)[rank]; }
};
static_assert(sizeof(ShmSlot) == 32);

/// Returns a number that no other process has, also where each has a pid namespace of its own.
LOCKSTEP_PROCESS_WIDE inline std::uint64_t process_token() {
  static const std::uint64_t drawn = (std::uint64_t{std::random_device()()} << 32) | 1;
  return drawn + (static_cast<std::uint64_t>(getpid()) << 1);  // another one in a forked child
}

/// What a rank tells the others.
struct alignas(64) ShmRank {
  std::atomic<std::uint32_t> bell;      ///< changes when the rank is to wake up
  std::atomic<std::uint64_t> process;   ///< its process_token(), 0 before ShmMemory::begin
  std::atomic<std::uint64_t> launched;  ///< the number of its next piece
  std::atomic<std::uint64_t> taken;     ///< the number of the next piece that it takes
  std::atomic<std::uint64_t> summing;   ///< the number of a piece of which it computes a part, and 1; else 0
};

/// A message on its way between two ranks.
struct alignas(64) ShmMessage {
  enum State : std::uint32_t {
    none,       ///< set by the receiver, who has all of it
    announced,  ///< by the sender
    wanted,     ///< by the receiver, who has found it, or has taken a part
    filled,     ///< by the sender, who has copied the next part into its block
  };
  std::atomic<std::uint32_t> state;
  std::int32_t tag;
  std::uint64_t bytes, signature, order;
  std::uint32_t block, part;
};

/// The memory that the ranks of a group on one host share: a memfd without a name, which ends with the last process
/// that has it. It is sealed at its whole size, so that no process can make another one fail by SIGBUS; its pages are
/// allocated as they are used, at most `blocks` blocks for each rank. A forked child does not have the mapping.
class ShmMemory {
 public:
  static constexpr std::size_t slots = 1024, blocks = 512, block_bytes = std::size_t{256} << 10,
                               messages = 16;
  static constexpr std::size_t first_blocks = 2;  // with which a rank begins
  static constexpr int most_ranks = 256;

  /// Creates the memory of `ranks` ranks. Throws ShmError.
  static std::shared_ptr<ShmMemory> create(int ranks) {
    const std::size_t size = Layout(ranks).size;
    rlimit largest{};
    if (getrlimit(RLIMIT_FSIZE, &largest) == 0 && largest.rlim_cur < size)  // a signal would end the process
      throw ShmError(formatted("the limit of a file's size (ulimit -f) is less than {} MiB", size >> 20));
    constexpr unsigned flags = MFD_CLOEXEC | MFD_ALLOW_SEALING, not_executable = 8;  // MFD_NOEXEC_SEAL
    Descriptor fd(memfd_create("lockstep", flags | not_executable));
    if (!fd.open()) fd = Descriptor(memfd_create("lockstep", flags));  // before Linux 6.3
    if (!fd.open()) throw ShmError(failed("memfd_create"));
    if (ftruncate(fd.get(), static_cast<off_t>(size)) != 0) throw ShmError(failed("ftruncate of a memfd"));
    if (fcntl(fd.get(), F_ADD_SEALS, seals) != 0) throw ShmError(failed("sealing a memfd"));
    auto memory = std::make_shared<ShmMemory>(std::move(fd), ranks);
    const std::size_t state = memory->at_.messages;
    if (!memory->allocate(0, state))
      throw ShmError(formatted("there are no {} KiB of memory left for its state", state >> 10));
    for (std::size_t i = 0; i < slots; ++i) memory->slot(i).open.store(i, std::memory_order_relaxed);
    return memory;
  }
  /// Maps the memory that another rank has created. Throws ShmError.
  ShmMemory(Descriptor fd, int ranks) : fd_(std::move(fd)), at_(ranks) {
    const off_t size = lseek(fd_.get(), 0, SEEK_END);
    if (static_cast<std::size_t>(size) != at_.size || (fcntl(fd_.get(), F_GET_SEALS) & seals) != seals)
      throw ShmError("the memory of the group is not what this version of lockstep makes");
    void* const mapped = mmap(nullptr, at_.size, PROT_READ | PROT_WRITE, MAP_SHARED, fd_.get(), 0);
    if (mapped == MAP_FAILED)
      throw ShmError(failed(formatted("mapping {} MiB (ulimit -v limits it)", at_.size >> 20)));
    base_ = static_cast<char*>(mapped);
    madvise(base_, at_.size, MADV_DONTFORK);
  }
  ~ShmMemory() { munmap(base_, at_.size); }

  [[nodiscard]] int fd() const { return fd_.get(); }
  [[nodiscard]] int ranks() const { return static_cast<int>(at_.ranks); }

  [[nodiscard]] ShmHead& head() const { return *of<ShmHead>(0); }
  [[nodiscard]] ShmRank& rank(int rank) const { return of<ShmRank>(page_bytes)[rank]; }
  [[nodiscard]] ShmSlot& slot(std::uint64_t piece) const {
    return *of<ShmSlot>(at_.slots + piece % slots * at_.slot_bytes);
  }
  [[nodiscard]] ShmMessage& message(int from, int to, std::size_t number) const {
    return of<ShmMessage>(at_.messages + index(from) * at_.message_bytes)[index(to) * messages + number];
  }
  [[nodiscard]] char* block(int rank, std::size_t number) const { return base_ + block_at(rank, number); }

  /// Allocates what this process needs to be a rank, and locks the rank's byte: the system unlocks it when the process
  /// ends, however it does, and a forked child does not have the lock. Throws ShmError.
  void begin(int rank) const {
    if (!allocate(at_.messages + index(rank) * at_.message_bytes, at_.message_bytes) ||
        !allocate_blocks(rank, 0, first_blocks))
      throw ShmError(formatted("there are no {} KiB of memory left", first_blocks * block_bytes >> 10));
    struct flock lock = byte_of(rank);
    if (fcntl(fd_.get(), F_SETLK, &lock) != 0) throw ShmError(failed("locking a byte of a memfd"));
    cpu_set_t own;
    CPU_ZERO(&own);
    sched_getaffinity(0, sizeof own, &own);
    for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu)
      if (CPU_ISSET(cpu, &own)) head().cores[cpu / 64].fetch_or(std::uint64_t{1} << (cpu % 64));
    this->rank(rank).process.store(process_token());
  }
  /// Returns whether the process of a rank has ended.
  [[nodiscard]] bool has_ended(int rank) const {
    const std::uint64_t process = this->rank(rank).process.load();
    struct flock lock = byte_of(rank);
    return process != 0 && process != process_token() && fcntl(fd_.get(), F_GETLK, &lock) == 0 &&
           lock.l_type == F_UNLCK;
  }
  /// Allocates `count` more blocks of a rank. Returns false if there is no memory.
  [[nodiscard]] bool allocate_blocks(int rank, std::size_t first, std::size_t count) const {
    return allocate(block_at(rank, first), count * block_bytes);
  }

 private:
  // Of the layout alone: the system's pages may be larger, as on aarch64, and fallocate takes any range.
  static constexpr std::size_t page_bytes = 4096, line_bytes = 64;
  static constexpr int seals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

  static std::string failed(const std::string& what) { return what + " failed: " + std::strerror(errno); }
  static std::size_t ceil_to(std::size_t value, std::size_t step) { return (value + step - 1) / step * step; }
  static std::size_t index(int rank) { return static_cast<std::size_t>(rank); }

  // Where everything lies, after a page for the head and the ranks.
  struct Layout {
    explicit Layout(int count) : ranks(index(count)) {}

    std::size_t ranks, slot_bytes = ceil_to(sizeof(ShmSlot) + 2 * ranks, line_bytes),
                       message_bytes = ceil_to(ranks * ShmMemory::messages * sizeof(ShmMessage), page_bytes),
                       slots = page_bytes + ranks * sizeof(ShmRank),
                       messages = ceil_to(slots + ShmMemory::slots * slot_bytes, page_bytes),
                       blocks = ceil_to(messages + ranks * message_bytes, block_bytes),
                       size = blocks + ranks * ShmMemory::blocks * block_bytes;
  };
  static struct flock byte_of(int rank) { return {F_WRLCK, SEEK_SET, rank, 1, 0}; }
  template <class T>
  [[nodiscard]] T* of(std::size_t offset) const {
    return reinterpret_cast<T*>(base_ + offset);
  }
  [[nodiscard]] std::size_t block_at(int rank, std::size_t number) const {
    return at_.blocks + (index(rank) * blocks + number) * block_bytes;
  }
  // Without this a page that the system cannot give would end the process when it is first written.
  [[nodiscard]] bool allocate(std::size_t offset, std::size_t bytes) const {
    if (memory_left() / at_.ranks < bytes) return false;  // all ranks may ask at once
    return TEMP_FAILURE_RETRY(
               fallocate(fd_.get(), 0, static_cast<off_t>(offset), static_cast<off_t>(bytes))) == 0;
  }
  // Returns the bytes that the memory cgroup and the host still have: beyond them the kernel would end a process.
  static std::size_t memory_left() {
    const auto number_after = [](const std::string& path, const std::string& name) {
      std::ifstream file(path);
      std::string word;
      std::size_t value = 0;
      while (file >> word)
        if (word == name && file >> value) break;
      return value;
    };
    std::size_t left = std::numeric_limits<std::size_t>::max();
    // `total`: of its statistics, that with the groups below it.
    const auto limit = [&](const std::string& group, const char* limit_file, const char* used_file,
                           const std::string& total) {
      std::size_t most = 0, used = 0;
      if (!(std::ifstream(group + limit_file) >> most && std::ifstream(group + used_file) >> used)) return;
      if (most - std::min(most, used) >= left) return;  // without the statistics, which take long
      const std::string stat = group + "/memory.stat";
      const std::size_t free =
          most + number_after(stat, total + "inactive_file") + number_after(stat, total + "active_file");
      left = std::min(left, free - std::min(free, used));
    };
    if (const std::size_t host = number_after("/proc/meminfo", "MemAvailable:"); host != 0) left = host << 10;
    std::string line, own[2];  // this process's group in version 2, and that in version 1
    for (std::ifstream groups("/proc/self/cgroup"); std::getline(groups, line);)
      if (const bool old = line.find(":memory:/") != std::string::npos; old || line.starts_with("0::/"))
        own[old] = line.substr(line.find(":/") + 1);
    for (const bool old : {false, true}) {
      const std::string root = old ? "/sys/fs/cgroup/memory" : "/sys/fs/cgroup";  // a container's own group
      for (std::string group = root + own[old]; group.size() >= root.size(); group.resize(group.rfind('/')))
        old ? limit(group, "/memory.limit_in_bytes", "/memory.usage_in_bytes", "total_")
            : limit(group, "/memory.max", "/memory.current", "");
    }
    return left;
  }

  const Descriptor fd_;
  char* base_ = nullptr;
  const Layout at_;
};

/// Blocks while `word` is `value`, at most until `until`. May return early.
inline void await_change(std::atomic<std::uint32_t>& word, std::uint32_t value,
                         std::chrono::steady_clock::time_point until) {
  const auto left = std::max(std::chrono::nanoseconds(0),
                             std::chrono::nanoseconds(until - std::chrono::steady_clock::now()));
  const timespec time{left.count() / 1'000'000'000, left.count() % 1'000'000'000};
  syscall(SYS_futex, &word, FUTEX_WAIT, value, &time, nullptr, 0);
}
/// Changes `word` and wakes all threads of all processes that wait for that.
inline void change(std::atomic<std::uint32_t>& word) {
  word.fetch_add(1, std::memory_order_release);
  syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace lockstep::inline v0_1::detail

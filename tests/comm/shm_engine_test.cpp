// The engine of shared memory, whose ranks are threads here: random programs, each result compared with what a plain loop
// gives; limits of the memory; ends.
#include "lockstep/comm/detail/shm_engine.hpp"

#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <csignal>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "lockstep/comm/detail/shm_exchange.hpp"
#include "support/catch.hpp"

namespace shm_engine_test {

using namespace lockstep::detail;
using Kind = ShmOperation::Kind;
using Clock = ShmEngine::Clock;
using Values = std::vector<std::uint32_t>;

std::shared_ptr<ShmMemory> memory_of(int ranks) {
  auto memory = ShmMemory::create(ranks);
  for (int rank = 0; rank < ranks; ++rank) memory->begin(rank);
  return memory;
}
void on_all(int ranks, const std::function<void(int rank)>& run) {
  std::vector<std::jthread> threads;
  for (int rank = 0; rank < ranks; ++rank) threads.emplace_back(run, rank);
}

struct Own : ShmOperation {
  Values in, out;
};
bool ends(ShmEngine& engine, const ShmOperation& operation, Clock::duration timeout) {
  return engine.wait(Clock::now() + timeout, [&] { return operation.ended(); });
}
// Empty without one.
std::string error_of(const ShmOperation& operation) {
  if (operation.error) try {
      std::rethrow_exception(operation.error);
    } catch (const std::exception& error) {
      return error.what();
    }
  return "";
}
// A step of a program, the same on all ranks. `from` sends to `root`, of a message.
struct Step {
  Kind kind;
  int root, from;
  std::size_t count;  // of a row
};

std::uint32_t value_of(int rank, std::size_t step, std::size_t i) {
  return static_cast<std::uint32_t>(rank * 1000003 + static_cast<int>(step) * 7919) +
         static_cast<std::uint32_t>(i);
}

std::shared_ptr<Own> make(const Step& step, std::size_t number, int rank, int ranks) {
  const auto n = static_cast<std::size_t>(ranks);
  const bool many_in = step.kind == Kind::all_to_all, many_out = many_in || step.kind == Kind::all_gather;
  auto own = std::make_shared<Own>();
  own->kind = step.kind;
  own->root = step.root;
  own->rows = many_in ? n : 1;
  own->row = step.kind == Kind::barrier ? 0 : step.count * 4;
  own->fold = fold<std::uint32_t, std::plus<>>;
  own->chunk =
      step.kind == Kind::barrier ? 0 : gloo_chunk_bytes(own->rows * own->row, 4, std::max<std::size_t>(2, n));
  own->signature = number + 1;
  for (std::size_t i = 0; i < step.count * own->rows; ++i) own->in.push_back(value_of(rank, number, i));
  own->out.assign(step.count * (many_out ? n : 1), 0);
  own->input = reinterpret_cast<const char*>(own->in.data());
  own->output = reinterpret_cast<char*>(own->out.data());
  return own;
}

// Whether the output of `rank` is right.
bool right(const Own& own, const Step& step, std::size_t number, int rank, int ranks) {
  const auto sum = [&](std::size_t i) {
    std::uint32_t total = 0;
    for (int r = 0; r < ranks; ++r) total += value_of(r, number, i);
    return total;
  };
  const auto expected = [&](std::size_t i) -> std::uint32_t {
    const std::size_t row = i / step.count, column = i % step.count;
    const auto mine = static_cast<std::size_t>(rank) * step.count + column;
    switch (step.kind) {
      case Kind::broadcast:
        return value_of(step.root, number, i);
      case Kind::all_reduce:
      case Kind::reduce:
        return sum(i);
      case Kind::all_gather:
        return value_of(static_cast<int>(row), number, column);
      case Kind::all_to_all:
        return value_of(static_cast<int>(row), number, mine);
      default:
        return 0;
    }
  };
  if (step.kind == Kind::barrier || (step.kind == Kind::reduce && rank != step.root) ||
      (step.kind == Kind::broadcast && rank == step.root))
    return true;
  for (std::size_t i = 0; i < own.out.size(); ++i)
    if (own.out[i] != expected(i)) return false;
  return true;
}

bool run_program(unsigned seed, int ranks, std::size_t steps) {
  std::mt19937 random(seed);
  const auto draw = [&](std::size_t most) { return static_cast<std::size_t>(random() % (most + 1)); };
  std::vector<Step> program;
  const std::size_t sizes[] = {1, 100, 5000, 70000, 200000};
  for (std::size_t i = 0; i < steps; ++i)
    program.push_back({static_cast<Kind>(draw(5)),
                       static_cast<int>(draw(static_cast<std::size_t>(ranks) - 1)), 0,
                       1 + draw(sizes[draw(4)])});
  const auto memory = memory_of(ranks);
  std::atomic<bool> good{true};
  on_all(ranks, [&](int rank) {
    ShmEngine engine(memory, rank, seed % 2 == 0);
    std::mt19937 own(seed * 100 + static_cast<unsigned>(rank));
    std::vector<std::pair<std::shared_ptr<Own>, std::size_t>> flying;
    const auto finish = [&](std::size_t which) {
      const auto [operation, number] = flying[which];
      flying.erase(flying.begin() + static_cast<std::ptrdiff_t>(which));
      if (!ends(engine, *operation, std::chrono::seconds(60)) || operation->error ||
          !right(*operation, program[number], number, rank, ranks))
        good = false;
    };
    for (std::size_t i = 0; i < program.size() && good; ++i) {
      flying.emplace_back(make(program[i], i, rank, ranks), i);
      engine.launch(flying.back().first);
      while (!flying.empty() && good && own() % 3 == 0) finish(own() % flying.size());
      if (own() % 16 == 0) std::this_thread::sleep_for(std::chrono::microseconds(own() % 300));
    }
    while (!flying.empty() && good) finish(flying.size() - 1);
    if (!engine.drain(Clock::now() + std::chrono::seconds(60))) good = false;
  });
  return good;
}

TEST_CASE("random programs of collectives give what a plain loop gives") {
  for (unsigned seed = 0; seed < 24; ++seed) {
    const int ranks = 1 + static_cast<int>(seed % 5);
    CAPTURE(seed, ranks);
    REQUIRE(run_program(seed, ranks, 60));
  }
}

TEST_CASE("many random programs", "[.release]") {
  for (unsigned seed = 100; seed < 160; ++seed) {
    const int ranks = 2 + static_cast<int>(seed % 7);
    CAPTURE(seed, ranks);
    REQUIRE(run_program(seed, ranks, 100));
  }
}

std::shared_ptr<Own> message_of(Kind kind, int other, int tag, std::size_t size) {
  auto message = std::make_shared<Own>();
  message->kind = kind;
  message->root = other;
  message->tag = tag;
  message->row = size * 4;
  message->signature = 9;
  return message;
}

TEST_CASE("messages of any size and tag arrive, in the order of their tag, whichever is asked for first") {
  constexpr int ranks = 3;
  constexpr std::size_t count = 40;
  const auto memory = memory_of(ranks);
  std::atomic<bool> good{true};
  on_all(ranks, [&](int rank) {
    ShmEngine engine(memory, rank, false);
    std::mt19937 random(7);
    std::vector<std::shared_ptr<Own>> sent, received;
    std::vector<std::pair<int, std::size_t>> expected;
    for (std::size_t i = 0; i < count; ++i) {
      const std::size_t size = random() % 4 == 0 ? 300000 : random() % 2000;
      const int tag = static_cast<int>(random() % 3);
      for (int other = 0; other < ranks; ++other) {
        if (other == rank) continue;
        const auto message = message_of(Kind::send, other, tag, size);
        for (std::size_t k = 0; k < size; ++k) message->in.push_back(value_of(rank, i, k));
        message->input = reinterpret_cast<const char*>(message->in.data());
        engine.launch(message);
        sent.push_back(message);
        const auto to = message_of(Kind::receive, other, tag, size);
        to->out.assign(size, 0);
        to->output = reinterpret_cast<char*>(to->out.data());
        received.push_back(to);
        expected.emplace_back(other, i);
      }
      if (i % 8 != 7) continue;  // ask for the last eight
      for (std::size_t k = received.size() - 16; k < received.size(); ++k) engine.launch(received[k]);
    }
    for (std::size_t k = 0; k < received.size(); ++k) {
      if (!ends(engine, *received[k], std::chrono::seconds(60))) good = false;
      for (std::size_t i = 0; i < received[k]->out.size(); ++i)
        if (received[k]->out[i] != value_of(expected[k].first, expected[k].second, i)) good = false;
    }
    for (const auto& message : sent)
      if (!ends(engine, *message, std::chrono::seconds(60))) good = false;
  });
  CHECK(good);
}

TEST_CASE("another operation on one rank ends all operations of all ranks, and an abort those of its own") {
  const auto memory = memory_of(2);
  std::string errors[2];
  on_all(2, [&](int rank) {
    ShmEngine engine(memory, rank, false);
    const auto operation = make({Kind::all_reduce, 0, 0, 10}, static_cast<std::size_t>(rank), rank, 2);
    engine.launch(operation);
    ends(engine, *operation, std::chrono::seconds(60));
    errors[rank] = error_of(*operation);
  });
  for (const std::string& error : errors) CHECK(error == "the ranks have launched different operations");

  const auto alone = memory_of(2);
  ShmEngine engine(alone, 0, false);
  const auto operation = make({Kind::all_reduce, 0, 0, 10}, 0, 0, 2);
  bool failed = false;
  engine.at_end(*operation, [&](bool error) { failed = error; });
  engine.launch(operation);
  CHECK_FALSE(ends(engine, *operation, std::chrono::milliseconds(20)));
  std::jthread aborts([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    engine.abort();
  });
  const auto begin = Clock::now();
  CHECK(ends(engine, *operation, std::chrono::seconds(60)));
  CHECK(Clock::now() - begin < std::chrono::seconds(30));
  CHECK(error_of(*operation) == "the operation was aborted");
  CHECK(failed);
}

TEST_CASE("a rank completes what all have launched, although another one has died since, and nothing else") {
  const auto memory = ShmMemory::create(2);
  memory->begin(0);
  const pid_t child = fork();
  if (child == 0) {  // has no mapping of its parent's memory
    const auto own = std::make_shared<ShmMemory>(Descriptor(dup(memory->fd())), 2);
    own->begin(1);
    ShmEngine engine(own, 1, false);
    engine.launch(make({Kind::all_reduce, 0, 0, 1000}, 0, 1, 2));
    raise(SIGKILL);
  }
  waitpid(child, nullptr, 0);
  ShmEngine engine(memory, 0, false);
  const auto operation = make({Kind::all_reduce, 0, 0, 1000}, 0, 0, 2);
  engine.launch(operation);
  CHECK(ends(engine, *operation, std::chrono::seconds(5)));
  CHECK(right(*operation, {Kind::all_reduce, 0, 0, 1000}, 0, 0, 2));
  const auto later = make({Kind::barrier, 0, 0, 0}, 1, 0, 2);
  engine.launch(later);
  CHECK(ends(engine, *later, std::chrono::seconds(30)));
  CHECK(error_of(*later) == "a process of the group has ended");
}

TEST_CASE("a limit of the process is a reason, and not its end") {
  for (const auto limit : {RLIMIT_FSIZE, RLIMIT_AS}) {
    CAPTURE(static_cast<int>(limit));
    const pid_t child = fork();
    if (child == 0) {
      const rlimit small{std::size_t{200} << 20, std::size_t{200} << 20};
      setrlimit(limit, &small);
      try {
        memory_of(2);
      } catch (const ShmError&) {
        _exit(3);
      }
      _exit(0);
    }
    int status = 0;
    waitpid(child, &status, 0);
    CHECK(WIFEXITED(status));
    CHECK(WEXITSTATUS(status) == 3);
  }
}

TEST_CASE("a function that throws at the end of an operation is the error of that operation") {
  const auto memory = memory_of(1);
  ShmEngine engine(memory, 0, false);
  const auto operation = make({Kind::barrier, 0, 0, 0}, 0, 0, 1);
  engine.at_end(*operation, [](bool) { throw std::length_error("of a function"); });
  engine.launch(operation);
  REQUIRE(operation->ended());
  CHECK_THROWS_AS(std::rethrow_exception(operation->error), std::length_error);
}

TEST_CASE("an operation releases its tensors when it ends, and not before") {
  const auto memory = memory_of(2);
  ShmEngine engine(memory, 0, false);
  const auto operation = make({Kind::all_reduce, 0, 0, 10}, 0, 0, 2);
  auto tensor = std::make_shared<int>();
  const std::weak_ptr<int> watched = tensor;
  operation->tensors = std::exchange(tensor, nullptr);
  engine.launch(operation);
  CHECK_FALSE(watched.expired());
  engine.abort();
  CHECK(watched.expired());
}

// A board for threads.
struct Board {
  std::mutex mutex;
  std::condition_variable changed;
  std::map<std::string, std::string> values;
  ShmBoard board() {
    return {[this](const std::string& key, const std::string& value) {
              const std::lock_guard lock(mutex);
              values[key] = value;
              changed.notify_all();
            },
            [this](const std::string& key) {
              std::unique_lock lock(mutex);
              changed.wait(lock, [&] { return values.contains(key); });
              return values[key];
            }};
  }
};

TEST_CASE("all ranks get the memory, or all get the reason why there is none") {
  const bool other_host = GENERATE(false, true);
  Board board;
  SharedMemory shared[3];
  on_all(3, [&](int rank) {
    ShmBoard own = board.board();
    if (other_host && rank == 2)  // as if rank 0 were elsewhere
      own.get = [get = own.get](const std::string& key) {
        return (key == "shm/0" ? "elsewhere" : "") + get(key);
      };
    shared[rank] = share_memory(own, rank, 3, std::chrono::seconds(10));
  });
  for (const SharedMemory& one : shared) {
    CHECK((one.memory != nullptr) == !other_host);
    CHECK(one.several_hosts == other_host);
    CHECK(one.obstacle == "");
  }
}

TEST_CASE("the memory has no name, cannot shrink, and is not for another user's processes") {
  const auto names = [] {
    std::vector<std::string> found;
    for (const auto& entry : std::filesystem::directory_iterator("/dev/shm"))
      found.push_back(entry.path().filename().string());
    std::sort(found.begin(), found.end());
    return found;
  };
  const auto before = names();
  Board board;
  std::vector<SharedMemory> ranks(2);
  std::jthread host([&] { ranks[0] = share_memory(board.board(), 0, 2, std::chrono::seconds(20)); });
  const std::string told = board.board().get("shm/0");
  // A process of another user comes first: it gets no descriptor.
  const bool is_root = geteuid() == 0;
  int connected[2] = {-1, -1};
  REQUIRE(pipe(connected) == 0);
  const pid_t stranger = is_root ? fork() : -1;
  if (stranger == 0) {
    const auto [address, length] = shm_exchange::address_of(told.substr(told.find('\n') + 1));
    const int fd = socket(AF_UNIX, SOCK_STREAM, 0);
    const bool reached =
        setuid(65534) == 0 && connect(fd, reinterpret_cast<const sockaddr*>(&address), length) == 0;
    const bool tells = write(connected[1], "x", 1) == 1;
    _exit(reached && tells && !shm_exchange::receive_descriptor(fd).open() ? 0 : 1);
  }
  char byte = 0;
  if (is_root) CHECK(read(connected[0], &byte, 1) == 1);
  if (!is_root) WARN("SKIPPED: another user's process, since this one is not root's");
  ranks[1] = share_memory(board.board(), 1, 2, std::chrono::seconds(20), /*ranks_of_host=*/100'000);
  host.join();
  int status = 0;
  if (is_root) {
    CHECK(waitpid(stranger, &status, 0) == stranger);
    CHECK(status == 0);
  }
  for (const int end : connected) close(end);
  REQUIRE(ranks[0].memory);
  REQUIRE(ranks[1].memory);
  CHECK_FALSE(ranks[1].spins);  // more ranks than cores
  CHECK(names() == before);
  CHECK(ftruncate(ranks[1].memory->fd(), 0) != 0);
  CHECK(errno == EPERM);
}

}  // namespace shm_engine_test

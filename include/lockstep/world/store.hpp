#pragma once

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <functional>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/error.hpp"
#include "lockstep/world/environment.hpp"
#include "lockstep/world/socket.hpp"

namespace lockstep {

using StorePtr = c10::intrusive_ptr<c10d::Store>;

namespace detail {

inline std::vector<std::uint8_t> to_bytes(const std::string& text) {
  return {text.begin(), text.end()};
}
inline std::string to_text(const std::vector<std::uint8_t>& bytes) {
  return {bytes.begin(), bytes.end()};
}

/// How long ranks wait for each other at the start: LOCKSTEP_RENDEZVOUS_TIMEOUT in seconds, 5 minutes without
/// it.
inline std::chrono::milliseconds rendezvous_timeout() {
  const auto seconds = integer_variable(process_variable, "LOCKSTEP_RENDEZVOUS_TIMEOUT", 1, 1'000'000);
  return std::chrono::seconds(seconds.value_or(300));
}

/// Runs `work`, turning what c10d throws into a RendezvousError that begins with `doing`.
template <class Work>
auto at_store(const std::string& doing, Work&& work) {
  try {
    return work();
  } catch (const c10::Error& error) {
    throw RendezvousError(fmt::format("{}: {}", doing, error.what_without_backtrace()));
  }
}

/// A client of the TCPStore at host:port, waiting until it listens.
inline StorePtr connect_tcp_store(const std::string& host, int port, std::chrono::milliseconds limit) {
  wait_for_listener(host, port, limit);
  return at_store(fmt::format("the store at {}:{} does not answer as one", host, port), [&]() -> StorePtr {
    c10d::TCPStoreOptions options;
    options.port = static_cast<std::uint16_t>(port);
    options.isServer = false;
    options.waitWorkers = false;
    options.timeout = limit;
    options.useLibUV = false;  // a build of LibTorch without libuv would refuse it
    return c10::make_intrusive<c10d::TCPStore>(host, options);
  });
}

/// A TCPStore hosted by this process on a socket that already listens, and its first client.
inline StorePtr host_tcp_store(const std::string& host, Listener listener, std::chrono::milliseconds limit) {
  return at_store(fmt::format("cannot host a store on port {}", listener.port), [&]() -> StorePtr {
    c10d::TCPStoreOptions options;
    options.port = static_cast<std::uint16_t>(listener.port);
    options.isServer = true;
    options.waitWorkers = false;
    options.timeout = limit;
    options.useLibUV = false;
    options.masterListenFd = listener.fd.release();
    return c10::make_intrusive<c10d::TCPStore>(host, options);
  });
}

/// Where the ranks really meet, once known; opening it again gives a connection of its own.
struct Meeting {
  StorePtr store;
  std::function<StorePtr(std::chrono::milliseconds limit)> again;
  bool hosted_here = false;  // the store ends with this process
};

/// torchrun's store outlives a failed attempt together with its keys. So it is only the board on which rank 0
/// pins the address of a store of this attempt: a pin of an earlier one leads to a closed port or to another
/// nonce, and is read again until the new one is there.
inline Meeting meet_through_board(const StorePtr& board, const std::string& board_host, int rank,
                                  std::chrono::milliseconds limit) {
  const std::string pin = "lockstep/store", proof = "lockstep/nonce";
  if (rank == 0) {
    auto listener = listen_on(0, false);
    const int port = listener.port;
    const auto host = address_towards(board_host);
    auto store = host_tcp_store("localhost", std::move(listener), limit);
    const auto nonce =
        fmt::format("{:x}", (std::uint64_t{std::random_device{}()} << 32) | std::random_device{}());
    store->set(proof, to_bytes(nonce));
    board->set(pin, to_bytes(fmt::format("{} {} {}", host, port, nonce)));
    return {store, [port](auto time) { return connect_tcp_store("localhost", port, time); }, true};
  }
  const auto deadline = std::chrono::steady_clock::now() + limit;
  std::string last = "rank 0 has not come";
  while (std::chrono::steady_clock::now() < deadline) {
    try {
      if (board->check({pin})) {
        const auto text = to_text(board->get(pin));
        const auto first = text.find(' '), second = text.find(' ', first + 1);
        const auto host = text.substr(0, first), nonce = text.substr(second + 1);
        const int port = whole_number(text.substr(first + 1, second - first - 1)).value_or(0);
        const auto open = [host, port](auto time) { return connect_tcp_store(host, port, time); };
        last = fmt::format("rank 0's store at {}:{} does not answer", host, port);
        wait_for_listener(host, port, std::chrono::milliseconds(200));
        auto store = open(limit);
        if (store->check({proof}) && to_text(store->get(proof)) == nonce) return {store, open, false};
      }
    } catch (const RendezvousError& error) {
      last = error.what();
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  throw RendezvousError(fmt::format("rank {} did not meet rank 0 within {} s: {}", rank,
                                    std::chrono::duration<double>(limit).count(), last));
}

/// The file through which the ranks meet. Throws UsageError where it cannot be opened for writing: c10d would
/// try that for minutes.
inline StorePtr open_file_store(const std::string& path, int size) {
  const int file = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644);
  if (file < 0)
    throw UsageError(fmt::format("cannot open the rendezvous file {}: {}", path, std::strerror(errno)));
  ::close(file);
  return c10::make_intrusive<c10d::FileStore>(path, size);
}

/// Opens the store of `env`: hosts it on rank 0 unless somebody does, and connects.
inline Meeting meet(const Environment& env, std::chrono::milliseconds limit) {
  if (env.rendezvous.empty()) {
    StorePtr store = c10::make_intrusive<c10d::HashStore>();  // one process: nobody to meet
    return {store, [store](auto) { return store; }, false};
  }
  const auto url = parse_rendezvous(env.rendezvous);
  if (!url.path.empty()) {
    const auto open = [path = url.path, size = env.size](auto time) {
      return at_store(fmt::format("cannot open the rendezvous file {}", path), [&]() -> StorePtr {
        auto store = open_file_store(path, size);
        store->setTimeout(time);
        return store;
      });
    };
    return {open(limit), open, false};
  }
  if (env.rank == 0 && !env.store_is_hosted) {
    auto store = host_tcp_store(url.host, listen_on(url.port, false), limit);
    return {store, [port = url.port](auto time) { return connect_tcp_store("localhost", port, time); }, true};
  }
  const auto open = [host = url.host, port = url.port](auto time) {
    return connect_tcp_store(host, port, time);
  };
  auto store = open(limit);
  if (env.store_outlives_attempts) return meet_through_board(store, url.host, env.rank, limit);
  return {store, open, false};
}

/// Signs in: no other process may be the same rank, and all must agree on how many there are.
inline void sign_in(c10d::Store& store, const Environment& env) {
  const auto agreed =
      to_text(store.compareSet("lockstep/size", {}, to_bytes(fmt::format("{} {}", env.size, env.rank))));
  const auto space = agreed.find(' ');
  const auto size = agreed.substr(0, space), by = agreed.substr(space + 1);
  if (size != std::to_string(env.size))
    throw RendezvousError(
        fmt::format("the ranks disagree on their number: rank {} says world size {}, rank {} says {}. "
                    "Start all of them with one WORLD_SIZE",
                    env.rank, env.size, by, size));
  const auto me = fmt::format("{} pid {}", host_name(), getpid());
  const auto owner = to_text(store.compareSet(fmt::format("lockstep/rank/{}", env.rank), {}, to_bytes(me)));
  if (owner != me)
    throw RendezvousError(fmt::format(
        "rank {} is claimed by {} and {}: give every process its own RANK{}", env.rank, owner, me,
        env.rendezvous.starts_with("file:") ? ", and every run a rendezvous file of its own" : ""));
}

}  // namespace detail
}  // namespace lockstep

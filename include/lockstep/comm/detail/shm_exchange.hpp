#pragma once

#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <fstream>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/comm/detail/shm_memory.hpp"
#include "lockstep/detail/descriptor.hpp"
#include "lockstep/detail/format.hpp"

/// How the ranks of a group come to share memory: rank 0 creates it, and passes it over a UNIX socket.
namespace lockstep::inline v0_1::detail {

/// The board on which the ranks find each other. `get` blocks until the key is set.
struct ShmBoard {
  std::function<void(const std::string& key, const std::string& value)> set;
  std::function<std::string(const std::string& key)> get;
};

/// What the ranks have agreed on: all of them have the memory, or none.
struct SharedMemory {
  std::shared_ptr<ShmMemory> memory = {};  ///< null if they cannot share one
  bool spins = false;                      ///< there is a core for each rank
  bool several_hosts = false;
  std::string obstacle = {};  ///< why there is none on one host
};

namespace shm_exchange {

inline constexpr const char *shared = "+", *other_host = "@";

/// Returns an address in the abstract namespace: a socket without a file, which ends with its process.
inline std::pair<sockaddr_un, socklen_t> address_of(const std::string& name) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  name.copy(address.sun_path + 1, sizeof address.sun_path - 1);
  return {address, static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size())};
}
inline bool is_own_user(int socket) {
  ucred peer{};
  socklen_t length = sizeof peer;
  return getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &length) == 0 && peer.uid == geteuid();
}
inline void set_timeout(int socket, std::chrono::milliseconds timeout) {
  const timeval time{timeout.count() / 1000, timeout.count() % 1000 * 1000};
  for (const int direction : {SO_RCVTIMEO, SO_SNDTIMEO})
    setsockopt(socket, SOL_SOCKET, direction, &time, sizeof time);
}
/// A message of one byte, with room for one descriptor.
struct DescriptorMessage {
  char byte = 0;
  iovec part{&byte, 1};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{nullptr, 0, &part, 1, control, sizeof control, 0};
};
inline void send_descriptor(int socket, int fd) {
  DescriptorMessage sent;
  cmsghdr* const header = CMSG_FIRSTHDR(&sent.message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(sizeof fd);
  std::memcpy(CMSG_DATA(header), &fd, sizeof fd);
  if (TEMP_FAILURE_RETRY(sendmsg(socket, &sent.message, MSG_NOSIGNAL)) != 1)
    throw ShmError(formatted("passing the memory to another rank failed: {}", std::strerror(errno)));
}
/// Returns no descriptor if the other side has closed the socket.
inline Descriptor receive_descriptor(int socket) {
  DescriptorMessage received;
  if (TEMP_FAILURE_RETRY(recvmsg(socket, &received.message, MSG_CMSG_CLOEXEC)) != 1) return Descriptor();
  const cmsghdr* const header = CMSG_FIRSTHDR(&received.message);
  if (header == nullptr || header->cmsg_type != SCM_RIGHTS) return Descriptor();
  int fd = -1;
  std::memcpy(&fd, CMSG_DATA(header), sizeof fd);
  return Descriptor(fd);
}

/// Returns what tells hosts apart. Containers of one host have the same.
inline std::string boot_of_host() {
  std::string id;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> id;
  return id;
}

/// The side of rank 0. Returns what all ranks are told: `shared`, `other_host` or the obstacle.
inline std::string serve(const ShmBoard& board, int ranks, std::chrono::milliseconds timeout,
                         std::shared_ptr<ShmMemory>& memory) {
  Descriptor listener;
  std::string told, result = shared;
  try {
    memory = ShmMemory::create(ranks);
    memory->begin(0);
    const std::string name = formatted("lockstep-{}-{:x}", getpid(), std::random_device()());
    const auto [address, length] = address_of(name);
    listener = Descriptor(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    if (bind(listener.get(), reinterpret_cast<const sockaddr*>(&address), length) != 0 ||
        listen(listener.get(), ranks) != 0)
      throw ShmError(formatted("listening on a UNIX socket failed: {}", std::strerror(errno)));
    set_timeout(listener.get(), timeout);
    told = boot_of_host() + "\n" + name;
  } catch (const ShmError& error) {
    result = formatted("rank 0: {}", error.what());
  }
  board.set("shm/0", told);
  for (int rank = 1; rank < ranks; ++rank)
    if (const std::string answer = board.get(formatted("shm/{}", rank)); answer != shared && result == shared)
      result = answer;
  if (result != shared) return result;
  std::vector<Descriptor> connections;
  while (static_cast<int>(connections.size()) + 1 < ranks) {
    Descriptor connection(
        static_cast<int>(TEMP_FAILURE_RETRY(accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC))));
    if (!connection.open())
      return formatted("rank 0: no connection of another rank: {}", std::strerror(errno));
    if (!is_own_user(connection.get())) continue;  // no rank
    set_timeout(connection.get(), timeout);
    send_descriptor(connection.get(), memory->fd());
    connections.push_back(std::move(connection));
  }
  for (const Descriptor& connection : connections) {  // each answers with a line
    std::string answer;
    char byte = 0;
    while (TEMP_FAILURE_RETRY(read(connection.get(), &byte, 1)) == 1 && byte != '\n') answer += byte;
    if (answer != shared) return answer.empty() ? "a rank has not answered rank 0" : answer;
  }
  return shared;
}

/// The side of the other ranks.
inline void join(const ShmBoard& board, int rank, int ranks, std::chrono::milliseconds timeout,
                 std::shared_ptr<ShmMemory>& memory) {
  const std::string told = board.get("shm/0");
  const auto line = told.find('\n');
  std::string answer = shared;
  Descriptor connection(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  set_timeout(connection.get(), timeout);
  if (line != std::string::npos) {
    const auto [address, length] = address_of(told.substr(line + 1));
    if (told.substr(0, line) != boot_of_host())
      answer = other_host;
    else if (connect(connection.get(), reinterpret_cast<const sockaddr*>(&address), length) != 0)
      answer = formatted(
          "rank {} cannot reach rank 0 by a UNIX socket ({}): are they in different network namespaces?",
          rank, std::strerror(errno));
    else if (!is_own_user(connection.get()))
      answer = formatted("rank {} is a process of another user than rank 0", rank);
  }
  board.set(formatted("shm/{}", rank), answer);
  if (line == std::string::npos || answer != shared) return;
  try {
    Descriptor fd = receive_descriptor(connection.get());
    if (!fd.open()) throw ShmError(formatted("no memory came from rank 0: {}", std::strerror(errno)));
    memory = std::make_shared<ShmMemory>(std::move(fd), ranks);
    memory->begin(rank);
  } catch (const ShmError& error) {
    answer = formatted("rank {}: {}", rank, error.what());
  }
  answer += '\n';  // rank 0 may have gone on
  static_cast<void>(send(connection.get(), answer.data(), answer.size(), MSG_NOSIGNAL));
}

}  // namespace shm_exchange

/// Makes the memory of the ranks of a group, or finds why they cannot share one. Collective over the ranks that have
/// the board; rank 0 decides for all. Throws what the board throws.
inline SharedMemory share_memory(const ShmBoard& board, int rank, int ranks,
                                 std::chrono::milliseconds timeout, int ranks_of_host = 0) {
  std::string decision;
  SharedMemory result;
  if (ranks > ShmMemory::most_ranks)
    return {.obstacle = formatted("more than {} ranks", ShmMemory::most_ranks)};
  if (rank == 0) {
    try {
      decision = shm_exchange::serve(board, ranks, timeout, result.memory);
    } catch (const ShmError& error) {
      decision = error.what();
    }
    board.set("shm", decision);
  } else {
    shm_exchange::join(board, rank, ranks, timeout, result.memory);
    decision = board.get("shm");
  }
  if (decision == shm_exchange::shared && result.memory) {
    int cores = 0;
    for (const auto& word : result.memory->head().cores) cores += __builtin_popcountll(word.load());
    result.spins = cores >= std::max(ranks, ranks_of_host);
    return result;
  }
  result.memory.reset();
  result.several_hosts = decision == shm_exchange::other_host;
  if (!result.several_hosts) result.obstacle = decision;
  return result;
}

}  // namespace lockstep::inline v0_1::detail

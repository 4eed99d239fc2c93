#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "lockstep/detail/at_most.hpp"
#include "lockstep/detail/format.hpp"
#include "lockstep/detail/libtorch_version.hpp"
#include "lockstep/error.hpp"
#include "lockstep/world/detail/rendezvous.hpp"
#include "lockstep/world/detail/socket.hpp"
#include "lockstep/world/detail/store_connection.hpp"
#include "lockstep/world/detail/store_protocol.hpp"
#include "lockstep/world/detail/timeouts.hpp"

namespace lockstep::inline v0_1::detail {

/// A StoreServer as a c10d::Store, over a connection that many of them share. Thread-safe.
///
/// Every call ends within the timeout of this client (`setTimeout`), whatever the server does; a `wait` with
/// a timeout of its own ends within that timeout. A call throws c10::DistStoreError if it times out or the
/// server refuses it, and c10::DistNetworkError if the connection is lost. A lost connection stays lost. A
/// timeout of zero means no timeout, as in c10d.
class StoreClient : public ClonableStore {
 public:
  /// `timeout` is that of each call.
  StoreClient(std::shared_ptr<StoreConnection> connection, std::chrono::milliseconds timeout)
      : connection_(std::move(connection)) {
    timeout_ = timeout;
  }

  c10::intrusive_ptr<c10d::Store> clone() override {
    return c10::make_intrusive<StoreClient>(connection_, timeout_);
  }

  using c10d::Store::compareSet;
  using c10d::Store::set;

  void set(const std::string& key, const std::vector<std::uint8_t>& value) override {
    multiSet({key}, {value});
  }

  void multiSet(const std::vector<std::string>& keys,
                const std::vector<std::vector<std::uint8_t>>& values) override {
    std::vector<std::string_view> texts;
    for (const auto& value : values) texts.push_back(view(value));
    request(StoreOperation::set, timeout_, keys, texts);
  }

  std::vector<std::uint8_t> compareSet(const std::string& key, const std::vector<std::uint8_t>& expected,
                                       const std::vector<std::uint8_t>& desired) override {
    return bytes(request(StoreOperation::compare_set, timeout_, key, view(expected), view(desired)));
  }

  std::vector<std::uint8_t> get(const std::string& key) override { return multiGet({key}).at(0); }

  std::vector<std::vector<std::uint8_t>> multiGet(const std::vector<std::string>& keys) override {
    const auto reply = request(StoreOperation::get, timeout_, keys);
    FrameReader reader(reply);
    std::vector<std::vector<std::uint8_t>> values;
    for (std::size_t i = 0; i < keys.size(); ++i) values.push_back(bytes(reader.text()));
    return values;
  }

  std::int64_t add(const std::string& key, std::int64_t value) override {
    return decoded<std::int64_t>(request(StoreOperation::add, timeout_, key, value));
  }

  bool deleteKey(const std::string& key) override {
    return decoded<bool>(request(StoreOperation::erase, timeout_, key));
  }

  bool check(const std::vector<std::string>& keys) override {
    return decoded<bool>(request(StoreOperation::check, timeout_, keys));
  }

  // The base class takes a value that is there already, and is the same, for its own.
  void append(const std::string&, const std::vector<std::uint8_t>&) override {
    C10_THROW_ERROR(NotImplementedError, "the store appends nothing: use compareSet");
  }
  std::int64_t getNumKeys() override { C10_THROW_ERROR(NotImplementedError, "the store counts no keys"); }

  void wait(const std::vector<std::string>& keys) override { wait(keys, timeout_); }
  void wait(const std::vector<std::string>& keys, const std::chrono::milliseconds& timeout) override {
    request(StoreOperation::wait, timeout, keys);
  }

  [[nodiscard]] bool hasExtendedApi() const override { return true; }

 private:
  template <class... Arguments>
  std::string request(StoreOperation operation, std::chrono::milliseconds timeout,
                      const Arguments&... arguments) {
    constexpr std::chrono::milliseconds longest = std::chrono::hours(24 * 365);
    const auto until =
        StoreConnection::Clock::now() + (timeout == kNoTimeout ? longest : std::min(timeout, longest));
    try {
      return connection_->request(operation, until, nullptr, arguments...);
    } catch (const StoreLost& error) {
      C10_THROW_ERROR(DistNetworkError, error.what());
    } catch (const std::runtime_error& error) {
      C10_THROW_ERROR(DistStoreError, error.what());
    }
  }

  static std::string_view view(const std::vector<std::uint8_t>& bytes) {
    return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
  }
  static std::vector<std::uint8_t> bytes(std::string_view text) { return {text.begin(), text.end()}; }

  std::shared_ptr<StoreConnection> connection_;
};

using StorePtr = c10::intrusive_ptr<c10d::Store>;

/// Runs `work`. Rethrows the exceptions of a store as RendezvousError whose text begins with `doing`.
template <class Work>
auto at_store(const std::string& doing, Work&& work) {
  try {
    return work();
  } catch (const c10::Error& error) {
    throw RendezvousError(formatted("{}: {}", doing, printable(error.what_without_backtrace())));
  } catch (const StoreLost& error) {  // of no call: another start may mend it
    throw RendezvousError(
        Failure{.rank = process_rank.load(), .message = formatted("{}: {}", doing, printable(error.what()))});
  } catch (const StoreError& error) {
    throw RendezvousError(formatted("{}: {}", doing, printable(error.what())));
  }
}

/// The store of a rendezvous that this process has joined.
struct Rendezvous {
  StorePtr store;
  std::shared_ptr<StoreConnection> connection = {};  // null in a world of one rank
  bool doubted = false;  // another process may serve the ranks, see Listener::doubt
};

/// The key of rank 0's address and secret on the store of torchrun's agent.
inline constexpr const char* board_key = "lockstep/store";

/// Connects to the store of a run under torchrun. That of torchrun's agent, which outlives a failed attempt together with
/// its keys, is the board on which rank 0 publishes the address and secret of the store of this attempt. An earlier
/// attempt's address leads to a closed port or to a store with another secret; then the board is read again until rank 0 has
/// replaced it. Calls `waiting` with what this rank waits for.
inline std::shared_ptr<StoreConnection> connect_under_torchrun(const StoreEndpoint& endpoint, int rank,
                                                               Milliseconds timeout,
                                                               const StoreConnection::Waiting& waiting) {
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  const auto agent = formatted("the store of torchrun's agent at {}", endpoint.text());
  connect_to(
      endpoint, timeout, [&](const std::string& reason) { waiting(formatted("{}: {}", agent, reason)); },
      [](const Descriptor&, auto) { return std::string(); });
  const c10d::TCPStoreOptions options{.port = static_cast<std::uint16_t>(endpoint.port),
                                      .waitWorkers = false,
                                      .timeout = timeout,
                                      .useLibUV = false};  // a LibTorch built without libuv would reject it
  const auto client = std::make_shared<StorePtr>();
  // Publishes `text` unless it is empty. Returns what is on the board. LibTorch's client has no timeout, not even for
  // connecting, if its server does not answer.
  const auto on_board = [&](const std::string& text) {
    const auto read = std::make_shared<std::string>();
    const LeavableThread asking([read, client, text, host = endpoint.host, options] {
      if (!*client) *client = c10::make_intrusive<c10d::TCPStore>(host, options);
      c10d::Store& board = **client;
      if (!text.empty()) board.set(board_key, text);
      if (board.check({board_key})) *read = board.get_to_str(board_key);
    });
    while (!asking.ends_within(last_retry_pause)) {
      if (std::chrono::steady_clock::now() >= deadline)
        throw RendezvousError(
            formatted("{} does not answer after {} s: look at the output of torchrun on that host, and "
                      "start it again",
                      agent, std::chrono::duration<double>(timeout).count()));
      waiting(formatted("{}: it does not answer", agent));
    }
    const auto what = *client ? " failed"
                              : " does not answer as one; set MASTER_ADDR and MASTER_PORT to those of this "
                                "run of torchrun";
    at_store(agent + what, [&] { asking.rethrow(); });
    return *read;
  };
  if (rank == 0) {
    const auto host = address_towards(endpoint.host);
    auto listener = listen_on(host, 0);
    const auto secret = random_secret();
    const auto text = formatted("{} {} {}", host, listener.port, secret);
    const auto connection = host_store(std::move(listener), secret, timeout);
    on_board(text);
    return connection;
  }
  std::string last = formatted("it has not come to {}. Look at the output of rank 0", agent);
  while (std::chrono::steady_clock::now() < deadline) {
    const auto text = on_board({});
    try {
      StoreEndpoint found{
          .remedy = "Look at the output of rank 0; a firewall between the hosts must let through every port"};
      if (std::istringstream(text) >> found.host >> found.port >> found.secret)
        return std::make_shared<StoreConnection>(found, greeting_timeout);
    } catch (const RendezvousError& error) {
      last = printable(error.what());
    }
    waiting("rank 0: " + last);
    std::this_thread::sleep_for(board_pause);
  }
  throw RendezvousError(
      formatted("rank {} did not reach rank 0 within {} s (LOCKSTEP_RENDEZVOUS_TIMEOUT): {}", rank,
                std::chrono::duration<double>(timeout).count(), last));
}

}  // namespace lockstep::inline v0_1::detail

#pragma once

#include <c10/util/Exception.h>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/world/detail/store_connection.hpp"

namespace lockstep::detail {

/// c10d::Store with `clone`, which LibTorch declares since 2.8: subclasses can write `override` for any
/// version.
class ClonableStore : public c10d::Store {
 public:
  virtual c10::intrusive_ptr<c10d::Store> clone() = 0;
};

/// A client of a StoreServer as a c10d::Store. Thread-safe: calls of several threads wait for each other.
///
/// Every call ends within the timeout of this client (`setTimeout`), whatever the server does; a `wait` with
/// a timeout of its own ends within that timeout. A call throws c10::DistStoreError if it times out or the
/// server refuses it, and c10::DistNetworkError if the connection is lost. A lost connection stays lost. A
/// timeout of zero means no timeout, as in c10d.
class StoreClient : public ClonableStore {
 public:
  /// Connects within `limit`, which is also the timeout of each call. The client keeps `hosted` alive. Throws
  /// RendezvousError.
  StoreClient(
      StoreEndpoint endpoint, std::chrono::milliseconds limit,
      const StoreConnection::Waiting& waiting = [](const std::string&) {},
      std::shared_ptr<void> hosted = nullptr)
      : endpoint_(std::move(endpoint)), hosted_(std::move(hosted)), connection_(endpoint_, limit, waiting) {
    timeout_ = limit;
  }

  [[nodiscard]] const StoreConnection& connection() const { return connection_; }
  /// Returns the endpoint with the address that was reached, so that no name is looked up again.
  [[nodiscard]] StoreEndpoint endpoint() const {
    return {connection_.server_address(), endpoint_.port, endpoint_.secret};
  }

  c10::intrusive_ptr<c10d::Store> clone() override {
    return c10::make_intrusive<StoreClient>(
        endpoint(), timeout_, [](const std::string&) {}, hosted_);
  }

  using c10d::Store::compareSet;
  using c10d::Store::set;

  void set(const std::string& key, const std::vector<std::uint8_t>& value) override {
    multiSet({key}, {value});
  }

  void multiSet(const std::vector<std::string>& keys,
                const std::vector<std::vector<std::uint8_t>>& values) override {
    std::vector<std::string> texts;
    for (const auto& value : values) texts.emplace_back(value.begin(), value.end());
    request(StoreOperation::set, end(), [&](FrameWriter& out) { out.texts(keys).texts(texts); });
  }

  std::vector<std::uint8_t> compareSet(const std::string& key, const std::vector<std::uint8_t>& expected,
                                       const std::vector<std::uint8_t>& desired) override {
    return bytes(request(StoreOperation::compare_set, end(),
                         [&](FrameWriter& out) { out.text(key).text(view(expected)).text(view(desired)); }));
  }

  std::vector<std::uint8_t> get(const std::string& key) override { return multiGet({key}).at(0); }

  std::vector<std::vector<std::uint8_t>> multiGet(const std::vector<std::string>& keys) override {
    const auto reply = request(StoreOperation::get, end(), [&](FrameWriter& out) { out.texts(keys); });
    FrameReader reader(reply);
    std::vector<std::vector<std::uint8_t>> values;
    for (std::size_t i = 0; i < keys.size(); ++i) values.push_back(bytes(reader.text()));
    return values;
  }

  std::int64_t add(const std::string& key, std::int64_t value) override {
    return integer(request(StoreOperation::add, end(), [&](FrameWriter& out) {
      out.text(key).integer(static_cast<std::uint64_t>(value));
    }));
  }

  void append(const std::string& key, const std::vector<std::uint8_t>& value) override {
    request(StoreOperation::append, end(), [&](FrameWriter& out) { out.text(key).text(view(value)); });
  }

  bool deleteKey(const std::string& key) override {
    return truth(request(StoreOperation::erase, end(), [&](FrameWriter& out) { out.text(key); }));
  }

  bool check(const std::vector<std::string>& keys) override {
    return truth(request(StoreOperation::check, end(), [&](FrameWriter& out) { out.texts(keys); }));
  }

  std::int64_t getNumKeys() override {
    return integer(request(StoreOperation::count, end(), [](FrameWriter&) {}));
  }

  void wait(const std::vector<std::string>& keys) override { wait(keys, timeout_); }
  void wait(const std::vector<std::string>& keys, const std::chrono::milliseconds& timeout) override {
    request(StoreOperation::wait, end(timeout), [&](FrameWriter& out) { out.texts(keys); });
  }

  [[nodiscard]] bool hasExtendedApi() const override { return true; }

 private:
  using Clock = StoreConnection::Clock;

  [[nodiscard]] Clock::time_point end() const { return end(timeout_); }
  [[nodiscard]] static Clock::time_point end(std::chrono::milliseconds timeout) {
    constexpr auto longest = std::chrono::hours(24 * 365);
    return Clock::now() +
           (timeout == kNoTimeout ? longest : std::min<std::chrono::milliseconds>(timeout, longest));
  }

  template <class Fill>
  std::string request(StoreOperation operation, Clock::time_point until, Fill fill) {
    try {
      return connection_.request(operation, until, fill);
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
  static std::int64_t integer(const std::string& reply) {
    return static_cast<std::int64_t>(FrameReader(reply).integer());
  }
  static bool truth(const std::string& reply) { return FrameReader(reply).byte() != 0; }

  StoreEndpoint endpoint_;
  std::shared_ptr<void> hosted_;
  StoreConnection connection_;
};

}  // namespace lockstep::detail

#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <string_view>

#include "lockstep/error.hpp"
#include "lockstep/world/detail/failure.hpp"
#include "lockstep/world/detail/printable.hpp"
#include "lockstep/world/detail/store_protocol.hpp"

namespace lockstep::detail {

/// What every rank must know. The store keeps the events of a run in order, and sends each to every rank.
struct Event {
  enum Kind : std::uint8_t {
    failed,    ///< a rank has failed: `failure`; of these the ranks are sent the first
    aborted,   ///< a rank has ended `group` by `failure`, if it knows why, and may go on
    departed,  ///< a rank has left `group` after its collective `position`
    refused    ///< a process that tried to join was refused for the reason in `failure`
  };
  Kind kind = failed;
  int rank = -1;
  std::string group = {};
  FailedCall position = {};
  Failure failure = {};

  [[nodiscard]] std::string encode() const {
    FrameWriter out;
    out.byte(kind).integer(static_cast<std::uint64_t>(rank)).text(group).text(detail::encode(failure));
    write_call(out, position);
    return std::string(out.payload());
  }
  static Event decode(std::string_view bytes) {
    FrameReader in(bytes);
    Event event;
    if (const std::uint8_t kind = in.byte(); kind <= refused) event.kind = static_cast<Kind>(kind);
    event.rank = static_cast<int>(in.integer());
    event.group = printable(std::string(in.text()));
    event.failure = decode_failure(in.text());
    event.position = read_call(in);
    return event;
  }
};

/// How a rendezvous has ended, for the ranks that wait for it.
struct Outcome {
  enum Kind : std::uint8_t { complete, failed, ended, refused } kind = complete;
  int rank = -1;          // that has ended with exit code 0 before it signed in, or alone was late
  std::string text = {};  // of a refusal

  [[nodiscard]] std::string encode() const {
    return std::string(
        FrameWriter().byte(kind).integer(static_cast<std::uint64_t>(rank)).text(text).payload());
  }
  static Outcome decode(std::string_view bytes) {
    FrameReader in(bytes);
    const auto kind = static_cast<Kind>(std::min<std::uint8_t>(in.byte(), refused));
    const int rank = static_cast<int>(in.integer());
    return {kind, rank, printable(std::string(in.text()))};
  }
};

}  // namespace lockstep::detail

#pragma once

#include <unistd.h>

#include <array>
#include <atomic>
#include <bit>
#include <chrono>
#include <limits>
#include <system_error>

#include "lockstep/detail/bytes.hpp"
#include "lockstep/detail/format.hpp"
#include "lockstep/detail/linkage.hpp"
#include "lockstep/report/tensorboard.hpp"
#include "lockstep/world/detail/socket.hpp"

namespace lockstep::inline v0_1::detail {

/// Encodes fields of a protocol buffer.
class ProtoMessage {
 public:
  ProtoMessage& integer(int field, std::uint64_t value) {
    key(field, 0);
    varint(value);
    return *this;
  }
  ProtoMessage& real(int field, double value) { return fixed(field, 1, std::bit_cast<std::uint64_t>(value)); }
  ProtoMessage& single(int field, float value) {
    return fixed(field, 5, std::bit_cast<std::uint32_t>(value));
  }
  /// A string or a nested message.
  ProtoMessage& bytes(int field, std::string_view value) {
    key(field, 2);
    varint(value.size());
    bytes_ += value;
    return *this;
  }
  [[nodiscard]] const std::string& text() const { return bytes_; }

 private:
  ProtoMessage& fixed(int field, unsigned type, auto bits) {
    key(field, type);
    append_little_endian(bytes_, bits);
    return *this;
  }
  void key(int field, unsigned type) { varint(static_cast<std::uint64_t>(field) << 3 | type); }
  void varint(std::uint64_t value) {
    for (; value >= 0x80; value >>= 7) bytes_ += static_cast<char>(value | 0x80);
    bytes_ += static_cast<char>(value);
  }

  std::string bytes_;
};

/// Returns a record of a TFRecord file: length, data and the masked CRC-32C of both.
inline std::string tf_record(std::string_view data) {
  const auto masked = [](std::string_view bytes) { return std::rotr(crc32c(bytes), 15) + 0xa282ead8U; };
  std::string record;
  append_little_endian(record, std::uint64_t{data.size()});
  append_little_endian(record, masked(record));
  record += data;
  append_little_endian(record, masked(data));
  return record;
}

/// Begins an Event with the current time.
inline ProtoMessage tf_event() {
  const std::chrono::duration<double> now = std::chrono::system_clock::now().time_since_epoch();
  ProtoMessage event;
  event.real(1, now.count());
  return event;
}

/// Returns whether `folder` holds an event file.
inline bool has_event_file(const std::filesystem::path& folder) {
  std::error_code error;
  auto entry = std::filesystem::directory_iterator(folder, error);
  for (; !error && entry != std::filesystem::directory_iterator(); entry.increment(error))
    if (entry->path().filename().string().starts_with("events.out.tfevents.")) return true;
  return false;
}

}  // namespace lockstep::inline v0_1::detail

namespace lockstep::inline v0_1 {

LOCKSTEP_INLINE TensorBoard::TensorBoard(const World& world, const std::filesystem::path& folder,
                                         TensorBoardOptions options)
    : meter_(options.every, "TensorBoardOptions") {
  if (world.rank() != 0) return;
  if (!options.purge_step && detail::has_event_file(folder))
    last_step_ = std::numeric_limits<std::int64_t>::max();
  static std::atomic<int> count{0};  // two in one second in one process
  const auto seconds =
      std::chrono::duration_cast<std::chrono::seconds>(std::chrono::system_clock::now().time_since_epoch());
  file_ = detail::AppendFile(folder / detail::formatted("events.out.tfevents.{}.{}.{}.{}", seconds.count(),
                                                        detail::host_name(), ::getpid(), count++),
                             world.log);
  file_.append(detail::tf_record(detail::tf_event().bytes(3, "brain.Event:2").text()));
  if (options.purge_step) start_session(*options.purge_step);
}

LOCKSTEP_INLINE void TensorBoard::add_scalar(std::string_view tag, double value, std::int64_t step) {
  const std::array values{std::pair{tag, value}};
  write(step, values);
}

LOCKSTEP_INLINE void TensorBoard::on_profile(const StepReport& report, const StepProfile& profile) {
  if (!file_.open()) return;
  if (report.step < last_step_) start_session(report.step);
  last_step_ = report.step;
  if (const auto now = meter_.take(report, profile)) {
    using Value = std::pair<std::string_view, double>;
    const std::array values{Value{"train/loss", now->loss}, Value{"train/lr", now->lr},
                            Value{"train/samples_per_second", now->samples_per_second}};
    write(now->step, values);
  }
}

LOCKSTEP_INLINE void TensorBoard::on_epoch(const EpochReport& report) {
  using Value = std::pair<std::string_view, double>;
  const std::array values{Value{"epoch/loss", report.loss}, Value{"epoch/seconds", report.seconds}};
  write(report.step - 1, values);
}

LOCKSTEP_INLINE void TensorBoard::start_session(std::int64_t step) {
  if (!file_.open()) return;
  auto event = detail::tf_event();
  event.integer(2, static_cast<std::uint64_t>(step))
      .bytes(7, detail::ProtoMessage().integer(1, 1).text());  // a SessionLog whose status is START
  file_.append(detail::tf_record(event.text()));
}

LOCKSTEP_INLINE void TensorBoard::write(std::int64_t step,
                                        std::span<const std::pair<std::string_view, double>> values) {
  if (!file_.open()) return;
  detail::ProtoMessage summary;
  for (const auto& [tag, value] : values) {
    detail::ProtoMessage scalar;
    scalar.bytes(1, detail::valid_utf8(tag)).single(2, static_cast<float>(value));
    summary.bytes(1, scalar.text());
  }
  auto event = detail::tf_event();
  event.integer(2, static_cast<std::uint64_t>(step)).bytes(5, summary.text());
  file_.append(detail::tf_record(event.text()));
}

}  // namespace lockstep::inline v0_1

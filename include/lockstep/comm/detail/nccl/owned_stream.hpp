#pragma once

#include "lockstep/comm/detail/nccl/device.hpp"

namespace lockstep::detail {

/// Owns a stream of a device. Null until make().
template <NcclDevice D>
class OwnedStream {
 public:
  using Stream = typename D::Stream;

  explicit OwnedStream(const D& device) : device_(device) {}
  ~OwnedStream() {
    if (stream_ != Stream{}) device_.destroy_stream(stream_);
  }
  OwnedStream(const OwnedStream&) = delete;
  OwnedStream& operator=(const OwnedStream&) = delete;

  /// Creates the stream. Throws what the device throws. Call it once.
  void make() { stream_ = device_.make_stream(); }
  [[nodiscard]] const Stream& get() const { return stream_; }

 private:
  D device_;
  Stream stream_{};
};

}  // namespace lockstep::detail

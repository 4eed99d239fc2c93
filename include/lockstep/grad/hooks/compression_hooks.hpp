#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <string_view>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/aminmax.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/stack.h>
#include <c10/core/ScalarType.h>

#include "lockstep/detail/format.hpp"
#include "lockstep/error.hpp"
#include "lockstep/grad/hooks/hook.hpp"

namespace lockstep::inline v0_1 {
namespace detail {

/// Tensors, one for each bucket, whose memory is kept from step to step.
class Scratch {
 public:
  at::Tensor& get(std::int64_t bucket, at::IntArrayRef sizes, const at::TensorOptions& options) {
    const auto index = static_cast<std::size_t>(bucket);
    if (index >= tensors_.size()) tensors_.resize(index + 1);
    at::Tensor& tensor = tensors_[index];
    if (!tensor.defined() || tensor.sizes() != sizes || tensor.scalar_type() != options.dtype() ||
        tensor.device() != options.device())
      tensor = at::empty(sizes, options);
    return tensor;
  }

 private:
  std::vector<at::Tensor> tensors_;
};

template <class Work>
struct CastReduction : PhasedReduction<CastReduction<Work>> {
  template <class Wait>
  void finish(Wait&& wait) {
    wait(work);
    if (!converted.is_same(flat)) flat.copy_(converted);
  }

  Work work;
  at::Tensor flat, converted;
};

/// A communication hook that casts each bucket to one dtype, divides by the number of ranks and sums in that
/// dtype, and casts back. Bitwise equal to torch.distributed.algorithms.ddp_comm_hooks.default_hooks.
class CastHook {
 public:
  static constexpr bool predivides = false;
  static constexpr bool propagates_nan = true;
  /// CapturedStep can capture it.
  static constexpr bool capturable = true;

  template <Communicator Comm>
  CastReduction<typename Comm::Work> start(Comm& comm, const GradientBucket& bucket) {
    at::Tensor converted = bucket.flat;
    if (type_ != bucket.flat.scalar_type()) {
      converted = scratch_.get(bucket.index, bucket.flat.sizes(),
                               bucket.flat.options().dtype(type_).requires_grad(false));
      converted.copy_(bucket.flat);
    }
    converted.div_(comm.size());
    wire_bytes_ += sent_bytes(comm, converted);
    return {{}, comm.all_reduce(converted, ReduceOp::sum), bucket.flat, converted};
  }

  [[nodiscard]] std::string_view name() const { return name_; }
  [[nodiscard]] std::int64_t wire_bytes() const { return wire_bytes_; }

 protected:
  CastHook(at::ScalarType type, const char* name) : type_(type), name_(name) {}

 private:
  at::ScalarType type_;
  const char* name_;
  Scratch scratch_;
  std::int64_t wire_bytes_ = 0;
};

}  // namespace detail

/// Compresses gradients to bfloat16: half the bytes of float32 and all of its range, with 8 bits of precision.
/// Each addition rounds to 8 bits; with many ranks use Bf16Fp32Hook.
///
/// Counterpart: bf16_compress_hook.
class Bf16Hook : public detail::CastHook {
 public:
  Bf16Hook() : CastHook(at::kBFloat16, "bf16") {}
};

/// Compresses gradients to float16: half the bytes of float32. Values above 65504 become infinite and values
/// below 6e-8 zero: scale the loss, or use Bf16Hook.
///
/// Counterpart: fp16_compress_hook.
class Fp16Hook : public detail::CastHook {
 public:
  Fp16Hook() : CastHook(at::kHalf, "fp16") {}
};

/// Sends bfloat16 and sums in float32: an all_to_all, additions in rank order, division by the number of ranks
/// and an all_gather. An element is rounded to bfloat16 twice, regardless of the number of ranks, and its bits do
/// not depend on its bucket. Needs a communicator with `all_to_all`.
class Bf16Fp32Hook {
 public:
  static constexpr bool predivides = false;
  static constexpr bool propagates_nan = true;

  template <Communicator Comm>
  requires requires(Comm& comm, at::TensorList tensors) { comm.all_to_all(tensors, tensors); }
  auto start(Comm& comm, const GradientBucket& bucket) {
    const auto ranks = static_cast<std::int64_t>(comm.size());
    const std::int64_t length = bucket.flat.numel(), part = (length + ranks - 1) / ranks;
    const auto options = bucket.flat.options().dtype(at::kBFloat16).requires_grad(false);
    const at::Tensor parts = mine_.get(bucket.index, {ranks, part}, options);
    const at::Tensor received = received_.get(bucket.index, {ranks, part}, options);
    const at::Tensor line = parts.view(-1);
    line.narrow(0, 0, length).copy_(bucket.flat);
    line.narrow(0, length, ranks * part - length).zero_();
    wire_bytes_ += detail::sent_bytes(comm, parts);
    return Sum<Comm>{{}, comm.all_to_all(received, parts), this, &comm, bucket.flat, parts, received};
  }

  [[nodiscard]] std::string_view name() const { return "bf16_fp32"; }
  /// Returns 2 (ranks + 1) ceil(n / ranks) for each bucket of n elements.
  [[nodiscard]] std::int64_t wire_bytes() const { return wire_bytes_; }

 private:
  template <class Comm>
  struct Sum : detail::PhasedReduction<Sum<Comm>> {
    template <class Wait>
    void finish(Wait&& wait) {
      wait(exchange);
      at::Tensor sum = received[0].to(at::kFloat);
      for (std::int64_t rank = 1; rank < received.size(0); ++rank) sum.add_(received[rank]);
      const at::Tensor mean = sum.div_(comm->size()).to(at::kBFloat16);
      hook->wire_bytes_ += detail::sent_bytes(*comm, mean);
      auto gather = comm->all_gather(parts, mean);
      wait(gather);
      flat.copy_(parts.view(-1).narrow(0, 0, flat.numel()));
    }

    typename Comm::Work exchange;
    Bf16Fp32Hook* hook;
    Comm* comm;
    at::Tensor flat, parts, received;
  };

  detail::Scratch mine_, received_;
  std::int64_t wire_bytes_ = 0;
};

struct QuantizedOptions {
  /// One scale and zero point per `channel` elements; false uses one per bucket.
  bool per_channel = false;
  std::int64_t channel = 512;
};

/// Quantizes gradients to 8 bits, bitwise equal to Python's hooks. Each rank maps its own range of values,
/// extended to include zero, to 0...255. All ranks gather all messages, scales and bytes in one collective,
/// and add the dequantized values in rank order. The error of an element is at most half a quantization step,
/// (max - min) / 255, of each rank. A gradient that is not finite makes its channel NaN on every rank.
///
/// Counterpart: quantization_pertensor_hook and quantization_perchannel_hook.
class QuantizedHook {
 public:
  static constexpr bool predivides = false;
  static constexpr bool propagates_nan = true;

  /// Throws UsageError if `channel` is below 1.
  explicit QuantizedHook(QuantizedOptions options = {}) : options_(options) {
    if (options.channel < 1)
      throw UsageError(detail::formatted("QuantizedHook: a channel of {} elements: give it at least one",
                                         options.channel));
  }

  template <Communicator Comm>
  auto start(Comm& comm, const GradientBucket& bucket) {
    const Layout layout = layout_of(bucket.flat);
    const auto bytes = bucket.flat.options().dtype(at::kByte).requires_grad(false);
    const at::Tensor own = own_.get(bucket.index, {layout.bytes()}, bytes);
    const at::Tensor all = all_.get(bucket.index, {comm.size(), layout.bytes()}, bytes);
    quantize(layout, bucket.flat, own);
    wire_bytes_ += detail::sent_bytes(comm, own);
    return Sum<typename Comm::Work>{{}, comm.all_gather(all, own), bucket.flat, all, layout};
  }

  [[nodiscard]] std::string_view name() const {
    return options_.per_channel ? "quantized_per_channel" : "quantized_per_tensor";
  }
  [[nodiscard]] NamedValues settings() const {
    return {{"channel", detail::formatted("{}", options_.channel)}};
  }
  /// Returns n + 8 c for each bucket of n elements in c channels.
  [[nodiscard]] std::int64_t wire_bytes() const { return wire_bytes_; }

 private:
  /// Layout of a message: the scales and the zero points of all channels in float32, then one byte per element.
  struct Layout {
    std::int64_t elements, channel, channels;
    [[nodiscard]] std::int64_t bytes() const { return 8 * channels + elements; }
    [[nodiscard]] std::int64_t tail() const { return elements % channel; }
  };

  [[nodiscard]] Layout layout_of(const at::Tensor& flat) const {
    const std::int64_t elements = flat.numel();
    const std::int64_t channel = options_.per_channel ? options_.channel : elements;
    return {elements, channel, (elements + channel - 1) / channel};
  }

  /// Calls `work(elements, scales, zero_points)` for the full channels, one per row, and for a shorter last one.
  template <class Work>
  static void by_channel(const Layout& layout, const at::Tensor& flat, const at::Tensor& head, Work&& work) {
    const std::int64_t whole = layout.elements / layout.channel;
    const auto rows = [&](std::int64_t first, std::int64_t count, std::int64_t length) {
      if (count == 0) return;
      const at::Tensor scales = head[0].narrow(0, first, count).unsqueeze(1);
      const at::Tensor zeros = head[1].narrow(0, first, count).unsqueeze(1);
      work(flat.narrow(0, first * layout.channel, count * length).view({count, length}), scales, zeros);
    };
    rows(0, whole, layout.channel);
    rows(whole, layout.tail() > 0 ? 1 : 0, layout.tail());
  }

  /// Returns [2, channels] float32: the scales and zero points by which Python's MinMaxObserver maps the
  /// range to quint8.
  static at::Tensor parameters(const Layout& layout, const at::Tensor& flat) {
    std::vector<at::Tensor> lowest, highest;
    const std::int64_t whole = layout.elements / layout.channel * layout.channel;
    const auto observe = [&](std::int64_t first, std::int64_t length, std::int64_t width) {
      if (length == 0) return;
      const auto [low, high] = at::aminmax(flat.narrow(0, first, length).to(at::kFloat).view({-1, width}), 1);
      lowest.push_back(low);
      highest.push_back(high);
    };
    observe(0, whole, layout.channel);
    observe(whole, layout.tail(), layout.tail());
    const at::Tensor low = at::cat(lowest).clamp_max_(0), high = at::cat(highest).clamp_min_(0);
    // The epsilon is float32's, as in Python. clamp propagates NaN, as torch.max does.
    const at::Tensor scale = high.sub(low).div_(255.0).clamp_min_(std::numeric_limits<float>::epsilon());
    const at::Tensor zero = low.div(scale).round_().to(at::kInt).neg_().clamp_(0, 255);
    return at::stack({scale, zero.to(at::kFloat)});
  }

  static void quantize(const Layout& layout, const at::Tensor& flat, const at::Tensor& message) {
    const at::Tensor head = parameters(layout, flat);
    message.narrow(0, 0, 8 * layout.channels).copy_(head.view(-1).view(at::kByte));
    const at::Tensor bytes = message.narrow(0, 8 * layout.channels, layout.elements);
    std::int64_t done = 0;
    by_channel(layout, flat, head,
               [&](const at::Tensor& values, const at::Tensor& scale, const at::Tensor& zero) {
                 const at::Tensor steps = values.div(scale).round_().add_(zero).clamp_(0, 255).nan_to_num_(0);
                 bytes.narrow(0, done, steps.numel()).copy_(steps.view(-1));
                 done += steps.numel();
               });
  }

  static at::Tensor dequantize(const Layout& layout, const at::Tensor& message) {
    // Cloned, since a row of bytes may not be aligned for float32.
    const at::Tensor head = message.narrow(0, 0, 8 * layout.channels).clone().view(at::kFloat).view({2, -1});
    at::Tensor values = message.narrow(0, 8 * layout.channels, layout.elements).to(at::kFloat);
    by_channel(layout, values, head, [](at::Tensor part, const at::Tensor& scale, const at::Tensor& zero) {
      part.sub_(zero).mul_(scale);
    });
    return values;
  }

  template <class Work>
  struct Sum : detail::PhasedReduction<Sum<Work>> {
    template <class Wait>
    void finish(Wait&& wait) {
      wait(work);
      at::Tensor sum = dequantize(layout, all[0]);
      for (std::int64_t rank = 1; rank < all.size(0); ++rank) sum.add_(dequantize(layout, all[rank]));
      flat.copy_(sum.div_(all.size(0)));
    }

    Work work;
    at::Tensor flat, all;
    Layout layout;
  };

  QuantizedOptions options_;
  detail::Scratch own_, all_;
  std::int64_t wire_bytes_ = 0;
};

}  // namespace lockstep::inline v0_1

#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/aminmax.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/stack.h>
#include <c10/core/ScalarType.h>
#include <fmt/format.h>

#include <cstdint>
#include <limits>
#include <string_view>
#include <utility>
#include <vector>

#include "lockstep/error.hpp"
#include "lockstep/grad/detail/hooks/phased_reduction.hpp"
#include "lockstep/grad/detail/hooks/scratch.hpp"
#include "lockstep/grad/hooks/hook.hpp"

namespace lockstep {

/// How QuantizedHook divides a bucket.
struct QuantizedOptions {
  /// One scale and zero point for `channel` elements each; otherwise for the whole bucket.
  bool per_channel = false;
  /// The elements of a channel.
  std::int64_t channel = 512;
};

/// Gradients travel as 8 bits: each rank maps its own range of values, zero included, to 0...255, all ranks
/// get all of them (all_gather), and add the values they stand for in the order of the ranks. The arithmetic
/// of Python's quantization_pertensor_hook and quantization_perchannel_hook, to the bit.
///
/// Python first gathers the scales and then the bytes; here both travel in one collective, which begins as
/// soon as the bucket is full. The error of an element is up to half a step of each rank, (max - min) / 255.
/// A gradient that is not finite makes its channel not-a-number on every rank.
class QuantizedHook {
 public:
  static constexpr bool predivides = false;
  static constexpr bool propagates_nan = true;

  /// Throws UsageError for a channel without elements.
  explicit QuantizedHook(QuantizedOptions options = {}) : options_(options) {
    if (options.channel < 1)
      throw UsageError(
          fmt::format("QuantizedHook: a channel of {} elements: give it at least one", options.channel));
  }

  template <class Comm>
  requires Reducing<Comm> && Gathering<Comm>
  auto start(Comm& comm, const GradientBucket& bucket) {
    const Layout layout = layout_of(bucket.flat);
    const auto bytes = bucket.flat.options().dtype(at::kByte).requires_grad(false);
    const at::Tensor own = own_.get(bucket.index, {layout.bytes()}, bytes);
    const at::Tensor all = all_.get(bucket.index, {comm.size(), layout.bytes()}, bytes);
    quantize(layout, bucket.flat, own);
    wire_bytes_ += detail::sent_bytes(comm, own);
    return Sum<typename Comm::Work>(comm.all_gather(all, own), bucket.flat, all, layout);
  }

  [[nodiscard]] std::string_view name() const {
    return options_.per_channel ? "quantized_per_channel" : "quantized_per_tensor";
  }
  [[nodiscard]] HookSettings settings() const { return {{"channel", fmt::to_string(options_.channel)}}; }
  /// n + 8 c for each bucket of n elements in c channels.
  [[nodiscard]] std::uint64_t wire_bytes() const { return wire_bytes_; }

 private:
  /// A message: the scales and the zero points of all channels, float32, then a byte for each element.
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

  /// Calls `work(elements, scales, zero_points)` for the whole channels, one a row, and for the last that is
  /// shorter.
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

  /// [2, channels] float32: the scales and zero points with which MinMaxObserver maps the range to quint8.
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
    // Python's eps is float32's; clamp keeps a not-a-number, as torch.max does.
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
    // Cloned: the bytes of a row need not lie where a float32 may.
    const at::Tensor head = message.narrow(0, 0, 8 * layout.channels).clone().view(at::kFloat).view({2, -1});
    at::Tensor values = message.narrow(0, 8 * layout.channels, layout.elements).to(at::kFloat);
    by_channel(layout, values, head, [](at::Tensor part, const at::Tensor& scale, const at::Tensor& zero) {
      part.sub_(zero).mul_(scale);
    });
    return values;
  }

  template <class Work>
  struct Sum : detail::PhasedReduction<Sum<Work>> {
    Sum(Work work, at::Tensor flat, at::Tensor all, Layout layout)
        : work(std::move(work)), flat(std::move(flat)), all(std::move(all)), layout(layout) {}

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
  std::uint64_t wire_bytes_ = 0;
};

}  // namespace lockstep

#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <thread>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

namespace lockstep::detail {

struct Point {
  float x, y;
};

/// A pen stroke through points of the unit square (y points down), curved or with straight segments.
struct Stroke {
  bool smooth;
  std::vector<Point> points;
};

using Glyph = std::vector<Stroke>;

/// For each digit, its handwritten variants.
inline const std::array<std::vector<Glyph>, 10>& glyphs() {
  constexpr bool bent = true, straight = false;
  static const std::array<std::vector<Glyph>, 10> all{{
      // 0
      {{{bent,
         {{.5F, .05F},
          {.2F, .2F},
          {.12F, .5F},
          {.2F, .8F},
          {.5F, .95F},
          {.8F, .8F},
          {.88F, .5F},
          {.8F, .2F},
          {.5F, .05F}}}},
       {{bent,
         {{.65F, .08F},
          {.3F, .12F},
          {.12F, .5F},
          {.25F, .88F},
          {.6F, .93F},
          {.86F, .6F},
          {.78F, .2F},
          {.5F, .02F},
          {.4F, .15F}}}}},
      // 1
      {{{straight, {{.5F, .05F}, {.5F, .95F}}}},
       {{straight, {{.28F, .28F}, {.52F, .05F}, {.52F, .95F}}}},
       {{straight, {{.28F, .25F}, {.52F, .05F}, {.52F, .95F}}}, {straight, {{.25F, .95F}, {.78F, .95F}}}}},
      // 2
      {{{bent, {{.18F, .25F}, {.35F, .07F}, {.65F, .07F}, {.8F, .28F}, {.6F, .55F}, {.15F, .93F}}},
        {straight, {{.15F, .93F}, {.85F, .93F}}}},
       {{bent,
         {{.2F, .22F},
          {.45F, .05F},
          {.76F, .2F},
          {.62F, .52F},
          {.3F, .85F},
          {.12F, .9F},
          {.2F, .76F},
          {.5F, .86F},
          {.9F, .92F}}}}},
      // 3
      {{{bent, {{.18F, .15F}, {.5F, .05F}, {.78F, .22F}, {.65F, .42F}, {.42F, .48F}}},
        {bent, {{.42F, .48F}, {.75F, .55F}, {.82F, .75F}, {.55F, .95F}, {.15F, .85F}}}},
       {{straight, {{.18F, .07F}, {.8F, .07F}, {.45F, .42F}}},
        {bent, {{.45F, .42F}, {.78F, .5F}, {.82F, .75F}, {.55F, .95F}, {.15F, .85F}}}}},
      // 4
      {{{straight, {{.25F, .05F}, {.15F, .55F}, {.85F, .55F}}}, {straight, {{.65F, .2F}, {.62F, .95F}}}},
       {{straight, {{.65F, .05F}, {.12F, .62F}, {.88F, .62F}}}, {straight, {{.65F, .05F}, {.65F, .95F}}}},
       {{bent, {{.2F, .08F}, {.16F, .4F}, {.4F, .52F}, {.8F, .45F}}},
        {straight, {{.8F, .05F}, {.72F, .95F}}}}},
      // 5
      {{{straight, {{.8F, .07F}, {.28F, .07F}, {.22F, .45F}}},
        {bent, {{.22F, .45F}, {.55F, .38F}, {.82F, .6F}, {.7F, .88F}, {.4F, .95F}, {.15F, .83F}}}},
       {{bent, {{.3F, .1F}, {.24F, .42F}, {.6F, .42F}, {.8F, .68F}, {.5F, .95F}, {.18F, .88F}}},
        {straight, {{.3F, .1F}, {.85F, .06F}}}}},
      // 6
      {{{bent,
         {{.7F, .05F},
          {.35F, .3F},
          {.18F, .65F},
          {.35F, .93F},
          {.65F, .93F},
          {.8F, .7F},
          {.6F, .52F},
          {.3F, .6F},
          {.2F, .72F}}}},
       {{bent,
         {{.4F, .05F},
          {.24F, .4F},
          {.2F, .75F},
          {.45F, .95F},
          {.78F, .82F},
          {.72F, .6F},
          {.45F, .55F},
          {.22F, .76F}}}}},
      // 7
      {{{straight, {{.15F, .08F}, {.85F, .08F}, {.4F, .95F}}}},
       {{straight, {{.15F, .08F}, {.85F, .08F}, {.42F, .95F}}}, {straight, {{.3F, .5F}, {.75F, .5F}}}},
       {{bent, {{.15F, .2F}, {.2F, .08F}, {.5F, .1F}, {.85F, .07F}, {.6F, .45F}, {.5F, .95F}}}}},
      // 8
      {{{bent,
         {{.5F, .48F},
          {.22F, .28F},
          {.5F, .05F},
          {.78F, .25F},
          {.5F, .48F},
          {.18F, .72F},
          {.5F, .95F},
          {.82F, .72F},
          {.5F, .48F}}}},
       {{bent,
         {{.75F, .15F},
          {.45F, .05F},
          {.22F, .25F},
          {.5F, .48F},
          {.8F, .72F},
          {.5F, .95F},
          {.2F, .75F},
          {.5F, .48F},
          {.78F, .2F}}}}},
      // 9
      {{{bent, {{.78F, .25F}, {.5F, .05F}, {.2F, .25F}, {.3F, .5F}, {.6F, .5F}, {.78F, .25F}}},
        {bent, {{.78F, .25F}, {.75F, .6F}, {.6F, .95F}}}},
       {{bent, {{.75F, .15F}, {.4F, .06F}, {.2F, .3F}, {.42F, .52F}, {.72F, .38F}, {.76F, .12F}}},
        {straight, {{.76F, .12F}, {.74F, .95F}}}},
       {{bent,
         {{.76F, .22F},
          {.45F, .05F},
          {.22F, .3F},
          {.45F, .5F},
          {.77F, .22F},
          {.78F, .65F},
          {.55F, .94F},
          {.25F, .88F}}}}},
  }};
  return all;
}

}  // namespace lockstep::detail

namespace lockstep {

/// Grayscale images and their labels. images: uint8 [N, 28, 28], 0 is paper and 255 is ink; labels: uint8
/// [N].
struct Digits {
  /// uint8 [N, 28, 28].
  at::Tensor images;
  /// uint8 [N].
  at::Tensor labels;
};

}  // namespace lockstep

namespace lockstep::detail {

/// splitmix64 keyed by seed and stream. Yields the same numbers on every machine and with every standard
/// library.
class DigitRandom {
 public:
  DigitRandom(std::uint64_t seed, std::uint64_t stream) : state_(seed) {
    state_ = next() ^ stream * 0xd1342543de82ef95;
  }

  std::uint64_t next() {
    std::uint64_t z = state_ += 0x9e3779b97f4a7c15;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
    z = (z ^ z >> 27) * 0x94d049bb133111eb;
    return z ^ z >> 31;
  }
  /// Returns a uniform number in [low, high).
  float uniform(float low, float high) {
    return low + (high - low) * static_cast<float>(next() >> 40) * 0x1p-24F;
  }
  /// Returns a bell-shaped number around 0, in (-width, width).
  float bell(float width) {
    // One statement a draw: compilers differ in the order in which they evaluate operands and arguments.
    const float first = uniform(-1, 1), second = uniform(-1, 1), third = uniform(-1, 1);
    return (first + second + third) * width / 3;
  }
  std::size_t below(std::size_t count) { return static_cast<std::size_t>(next() % count); }

 private:
  std::uint64_t state_;
};

/// A 28 x 28 page on which strokes of a round pen leave anti-aliased ink.
class DigitPage {
 public:
  static constexpr int side = 28;

  void segment(Point a, Point b, float radius, float strength) {
    const float dx = b.x - a.x, dy = b.y - a.y, length2 = dx * dx + dy * dy;
    const float reach = radius + 1;
    const auto clip = [](float at) { return std::clamp(static_cast<int>(at), 0, side - 1); };
    for (int row = clip(std::min(a.y, b.y) - reach); row <= clip(std::max(a.y, b.y) + reach); ++row)
      for (int column = clip(std::min(a.x, b.x) - reach); column <= clip(std::max(a.x, b.x) + reach);
           ++column) {
        const float px = static_cast<float>(column) + 0.5F - a.x, py = static_cast<float>(row) + 0.5F - a.y;
        const float along = length2 > 0 ? std::clamp((px * dx + py * dy) / length2, 0.F, 1.F) : 0.F;
        const float ex = px - along * dx, ey = py - along * dy;
        const float ink = std::clamp(radius + 0.5F - std::sqrt(ex * ex + ey * ey), 0.F, 1.F) * strength;
        float& pixel = ink_[static_cast<std::size_t>(row * side + column)];
        pixel = std::max(pixel, ink);
      }
  }

  [[nodiscard]] const std::array<float, side * side>& ink() const { return ink_; }

 private:
  std::array<float, side * side> ink_{};
};

/// One person's handwriting: how it bends, leans, scales and shifts strokes.
struct Hand {
  explicit Hand(DigitRandom& random) {
    // Rotates by the tangent: the last bit of a sine differs between libraries.
    const float tangent = random.bell(0.6F), norm = 1 / std::sqrt(1 + tangent * tangent);
    const float height = random.uniform(14, 21), width = height * random.uniform(0.5F, 0.95F);
    const float lean = random.bell(0.7F);
    xx = width * norm, xy = (lean * height - tangent * height) * norm;
    yx = tangent * width * norm, yy = (height + tangent * lean * height) * norm;
    x0 = DigitPage::side / 2.F + random.bell(4), y0 = DigitPage::side / 2.F + random.bell(4);
    pen = random.uniform(0.7F, 1.9F), strength = random.uniform(0.65F, 1);
    tremor = random.uniform(0.04F, 0.17F);
  }
  [[nodiscard]] Point place(Point p) const {
    const float x = p.x - 0.5F, y = p.y - 0.5F;
    return {x0 + xx * x + xy * y, y0 + yx * x + yy * y};
  }
  float xx, xy, yx, yy, x0, y0, pen, strength, tremor;
};

inline void draw_stroke(DigitPage& page, const Stroke& stroke, const Hand& hand, DigitRandom& random) {
  std::vector<Point> points;
  for (const Point p : stroke.points)
    points.push_back(hand.place({p.x + random.bell(hand.tremor), p.y + random.bell(hand.tremor)}));
  if (!stroke.smooth) {
    for (std::size_t i = 1; i < points.size(); ++i)
      page.segment(points[i - 1], points[i], hand.pen, hand.strength);
    return;
  }
  // A Catmull-Rom spline through the points, five segments between neighbors.
  const auto at = [&](std::size_t i) { return points[std::min(i, points.size() - 1)]; };
  Point from = points.front();
  for (std::size_t i = 0; i + 1 < points.size(); ++i) {
    const Point p0 = at(i == 0 ? 0 : i - 1), p1 = at(i), p2 = at(i + 1), p3 = at(i + 2);
    for (int step = 1; step <= 5; ++step) {
      const float t = static_cast<float>(step) / 5;
      const auto blend = [t](float a, float b, float c, float d) {
        return 0.5F * (2 * b + t * (c - a + t * (2 * a - 5 * b + 4 * c - d + t * (3 * b - a - 3 * c + d))));
      };
      const Point to{blend(p0.x, p1.x, p2.x, p3.x), blend(p0.y, p1.y, p2.y, p3.y)};
      page.segment(from, to, hand.pen, hand.strength);
      from = to;
    }
  }
}

/// Draws one digit into `pixels` (784 bytes).
inline void draw_digit(int digit, DigitRandom& random, std::uint8_t* pixels) {
  DigitPage page;
  const Hand hand(random);
  const auto& variants = glyphs()[static_cast<std::size_t>(digit)];
  for (const Stroke& stroke : variants[random.below(variants.size())])
    draw_stroke(page, stroke, hand, random);
  // An occasional stray mark, as on scanned paper.
  if (random.below(3) == 0) {
    const Point from{random.uniform(1, 27), random.uniform(1, 27)};
    const float strength = random.uniform(0.3F, 0.9F);
    page.segment(from, {from.x + random.bell(6), from.y + random.bell(6)}, 0.5F, strength);
  }
  const float grain = random.uniform(0, 0.25F);
  for (const float ink : page.ink()) {
    const float value = ink + (ink > 0 ? random.uniform(-grain, grain) : random.uniform(-3 * grain, grain));
    *pixels++ = static_cast<std::uint8_t>(std::clamp(value, 0.F, 1.F) * 255 + 0.5F);
  }
}

}  // namespace lockstep::detail

namespace lockstep {

/// Draws `count` handwriting-like digits, which depend on (count, seed) only, not on the machine or the
/// number of threads. Each block of ten holds every digit once, in its own order, so that a strided sampler
/// without shuffling sees all classes. 60,000 digits take about 2 s on one core.
inline Digits draw_digits(std::int64_t count, std::uint64_t seed) {
  Digits digits{at::empty({count, 28, 28}, at::kByte), at::empty({count}, at::kByte)};
  auto* images = digits.images.mutable_data_ptr<std::uint8_t>();
  auto* labels = digits.labels.mutable_data_ptr<std::uint8_t>();
  const auto draw_tens = [=](std::int64_t first, std::int64_t last) {
    for (std::int64_t ten = first; ten < last; ++ten) {
      std::array<std::uint8_t, 10> order{0, 1, 2, 3, 4, 5, 6, 7, 8, 9};
      detail::DigitRandom shuffle(seed, ~static_cast<std::uint64_t>(ten));
      for (std::size_t i = 9; i > 0; --i) std::swap(order[i], order[shuffle.below(i + 1)]);
      for (std::int64_t i = ten * 10; i < std::min(count, ten * 10 + 10); ++i) {
        detail::DigitRandom random(seed, static_cast<std::uint64_t>(i));
        labels[i] = order[static_cast<std::size_t>(i % 10)];
        detail::draw_digit(labels[i], random, images + i * 784);
      }
    }
  };
  const std::int64_t tens = (count + 9) / 10;
  const std::int64_t threads =
      std::clamp<std::int64_t>(std::thread::hardware_concurrency(), 1, tens / 100 + 1);
  std::vector<std::thread> others;
  for (std::int64_t t = 1; t < threads; ++t)
    others.emplace_back(draw_tens, tens * t / threads, tens * (t + 1) / threads);
  draw_tens(0, tens / threads);
  for (auto& thread : others) thread.join();
  return digits;
}

}  // namespace lockstep

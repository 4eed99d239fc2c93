#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include "lockstep/data/generator.hpp"

namespace lockstep::inline v0_1 {

/// Grayscale images and their labels.
struct Digits {
  /// uint8 [N, 28, 28]; 0 is paper and 255 is ink.
  at::Tensor images;
  /// uint8 [N].
  at::Tensor labels;
};

namespace detail {

struct Point {
  float x, y;
};

/// The two or three handwritten variants of each digit. A word is a pen stroke, curved (~) or with straight
/// segments (-), through points of the unit square (y points down): x and y in hundredths, two digits each.
inline constexpr std::array<std::array<std::string_view, 3>, 10> glyphs{{
    {"~500520201250208050958080885080205005", "~650830121250258860938660782050024015"},
    {"-50055095", "-282852055295", "-282552055295 -25957895"},
    {"~182535076507802860551593 -15938593", "~202245057620625230851290207650869092"},
    {"~18155005782265424248 ~42487555827555951585", "-180780074542 ~45427850827555951585"},
    {"-250515558555 -65206295", "-650512628862 -65056595", "~2008164040528045 -80057295"},
    {"-800728072245 ~224555388260708840951583", "~301024426042806850951888 -30108506"},
    {"~700535301865359365938070605230602072", "~40052440207545957882726045552276"},
    {"-150885084095", "-150885084295 -30507550", "~152020085010850760455095"},
    {"~504822285005782550481872509582725048", "~751545052225504880725095207550487820"},
    {"~782550052025305060507825 ~782575606095", "~751540062030425272387612 -76127495",
     "~76224505223045507722786555942588"},
}};

/// splitmix64 keyed by seed and stream. Yields the same numbers on every machine and with every standard library.
class DigitRandom {
 public:
  DigitRandom(std::uint64_t seed, std::uint64_t stream) : state_(seed) {
    state_ = next() ^ stream * 0xd1342543de82ef95;
  }

  std::uint64_t next() {
    const std::uint64_t value = mix_bits(state_);
    state_ += 0x9e3779b97f4a7c15;
    return value;
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

inline void draw_stroke(DigitPage& page, std::string_view stroke, const Hand& hand, DigitRandom& random) {
  const auto trembling = [&](std::size_t at) {
    const int hundredths = 10 * (stroke[at] - '0') + stroke[at + 1] - '0';
    return static_cast<float>(hundredths) / 100 + random.bell(hand.tremor);
  };
  std::vector<Point> points;
  for (std::size_t at = 1; at < stroke.size(); at += 4)
    points.push_back(hand.place({trembling(at), trembling(at + 2)}));
  if (stroke[0] == '-') {
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
  const auto& variants = glyphs[static_cast<std::size_t>(digit)];
  std::string_view glyph = variants[random.below(variants[2].empty() ? 2 : 3)];
  for (std::size_t end = 0; end != glyph.npos; glyph.remove_prefix(std::min(end, glyph.size() - 1) + 1)) {
    end = glyph.find(' ');
    draw_stroke(page, glyph.substr(0, end), hand, random);
  }
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

}  // namespace detail

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
  std::vector<std::jthread> others;
  for (std::int64_t t = 1; t < threads; ++t)
    others.emplace_back(draw_tens, tens * t / threads, tens * (t + 1) / threads);
  draw_tens(0, tens / threads);
  others.clear();  // joins them
  return digits;
}

}  // namespace lockstep::inline v0_1

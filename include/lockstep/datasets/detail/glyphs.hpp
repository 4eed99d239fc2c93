#pragma once

#include <array>
#include <vector>

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

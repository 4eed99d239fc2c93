#include "lockstep/datasets/image_transforms.hpp"

#include "lockstep/data/generator.hpp"
#include "lockstep/data/loader.hpp"
#include "lockstep/data/sampler.hpp"
#include "lockstep/datasets/transformed_dataset.hpp"
#include "support/catch.hpp"

namespace image_transforms_test {

using namespace lockstep;

namespace {

at::Tensor picture(std::int64_t height, std::int64_t width) {
  return torch::arange(3 * height * width).view({3, height, width}).remainder(251).to(at::kByte);
}

}  // namespace

TEST_CASE("RandomResizedCrop draws torchvision's boxes") {
  // torch.manual_seed(7); transforms.RandomResizedCrop.get_params(image, (0.08, 1.0), (3 / 4, 4 / 3))
  at::Generator generator = rank_generator(7, 0);
  const RandomResizedCrop crop;
  const auto draw = [&](std::int64_t height, std::int64_t width) {
    return crop.draw_box(height, width, generator);
  };
  CHECK(draw(375, 500) == CropBox{14, 89, 357, 300});
  CHECK(draw(375, 500) == CropBox{103, 112, 240, 230});
  CHECK(draw(500, 333) == CropBox{158, 31, 238, 291});
  CHECK(draw(60, 400) == CropBox{0, 160, 60, 80});
  CHECK(draw(64, 64) == CropBox{9, 0, 51, 53});
  CHECK(draw(480, 640) == CropBox{41, 206, 397, 338});
}

TEST_CASE("RandomResizedCrop falls back to the largest central part of an allowed ratio") {
  at::Generator generator = rank_generator(1, 0);
  // No part of 0.9 of these areas has an allowed ratio.
  const RandomResizedCrop crop{.scale = {0.9, 1}};
  CHECK(crop.draw_box(400, 60, generator) == CropBox{160, 0, 80, 60});
  CHECK(crop.draw_box(60, 400, generator) == CropBox{0, 160, 60, 80});
  CHECK(RandomResizedCrop{.scale = {2, 3}}.draw_box(50, 60, generator) == CropBox{0, 0, 50, 60});
}

TEST_CASE("RandomResizedCrop resizes the box that it draws") {
  at::Generator generator = rank_generator(3, 0), again = rank_generator(3, 0);
  const RandomResizedCrop crop{.size = 24};
  const at::Tensor image = picture(50, 60);
  for (int i = 0; i < 20; ++i) {
    const at::Tensor part = crop(image, generator);
    const CropBox box = crop.draw_box(50, 60, again);
    CHECK(part.sizes() == at::IntArrayRef{3, 24, 24});
    const at::Tensor cut = image.narrow(1, box.top, box.height).narrow(2, box.left, box.width);
    CHECK(at::equal(part, lockstep::detail::resized(cut, 24, 24)));
  }
}

TEST_CASE("RandomHorizontalFlip mirrors with its probability") {
  at::Generator generator = rank_generator(1, 0);
  const at::Tensor image = picture(2, 5);
  int mirrored = 0;
  for (int i = 0; i < 1000; ++i) {
    const at::Tensor result = RandomHorizontalFlip{.p = 0.25}(image, generator);
    const bool same = at::equal(result, image);
    REQUIRE((same || at::equal(result, image.flip(2))));
    mirrored += same ? 0 : 1;
  }
  CHECK(mirrored > 200);
  CHECK(mirrored < 300);
  CHECK(at::equal(RandomHorizontalFlip{.p = 1}(image, generator), image.flip(2)));
  CHECK(at::equal(RandomHorizontalFlip{.p = 0}(image, generator), image));
}

TEST_CASE("Resize makes the shorter side that long and keeps the ratio") {
  CHECK(Resize{20}(picture(50, 75)).sizes() == at::IntArrayRef{3, 20, 30});
  CHECK(Resize{20}(picture(75, 50)).sizes() == at::IntArrayRef{3, 30, 20});
  CHECK(Resize{20}(picture(33, 50)).sizes() == at::IntArrayRef{3, 20, 30});  // 30.3, cut
  CHECK(Resize{40}(picture(20, 20)).sizes() == at::IntArrayRef{3, 40, 40});
  const at::Tensor image = picture(20, 30);
  CHECK(at::equal(Resize{20}(image), image));
  // Without antialiasing, narrow stripes of 0 and 200 would keep their values.
  const at::Tensor stripes = torch::tensor({0, 200}, at::kByte).repeat({3, 64, 32});
  const at::Tensor small = Resize{4}(stripes);
  CHECK(small.min().item<int>() > 90);
  CHECK(small.max().item<int>() < 110);
}

TEST_CASE("CenterCrop cuts the centre, and pads an image that is smaller") {
  const at::Tensor image = picture(7, 10);
  CHECK(
      at::equal(CenterCrop{4}(image), image.slice(1, 2, 6).slice(2, 3, 7)));  // 1.5 rounds to 2, as in Python
  CHECK(at::equal(CenterCrop{5}(image), image.slice(1, 1, 6).slice(2, 2, 7)));  // 2.5 rounds to 2
  const at::Tensor padded = CenterCrop{9}(picture(4, 20));
  CHECK(padded.sizes() == at::IntArrayRef{3, 9, 9});
  CHECK(at::equal(padded.slice(1, 2, 6), picture(4, 20).slice(2, 6, 15)));  // 5.5 rounds to 6
  CHECK(padded.slice(1, 0, 2).eq(0).all().item<bool>());
  CHECK(padded.slice(1, 6, 9).eq(0).all().item<bool>());
}

TEST_CASE("ToTensor and Normalize give float32 values") {
  const at::Tensor image = picture(4, 5);
  const at::Tensor scaled = ToTensor{}(image);
  CHECK(scaled.scalar_type() == at::kFloat);
  CHECK(scaled.is_contiguous());
  CHECK(at::equal(scaled, image.to(at::kFloat) / 255));
  CHECK(at::equal(ToTensor{}(scaled), scaled));
  const at::Tensor normalized = Normalize{.mean = {0.5, 0.25, 0}, .std = {0.5, 0.25, 2}}(scaled);
  CHECK(at::allclose(normalized[0], scaled[0] * 2 - 1));
  CHECK(at::allclose(normalized[1], scaled[1] * 4 - 1));
  CHECK(at::equal(normalized[2], scaled[2] / 2));
  CHECK(at::equal(scaled, image.to(at::kFloat) / 255));  // unchanged
}

TEST_CASE("transforms name what they cannot use") {
  at::Generator generator = rank_generator(1, 0);
  const at::Tensor image = picture(4, 5);
  CHECK_THROWS_AS(Resize{4}(image[0]), DataError);
  CHECK_THROWS_AS(CenterCrop{4}(image.unsqueeze(0)), DataError);
  CHECK_THROWS_AS((RandomResizedCrop{4}(at::empty({3, 0, 5}, at::kByte), generator)), DataError);
  CHECK_THROWS_AS(Resize{0}(image), UsageError);
  CHECK_THROWS_AS(Normalize{}(image), DataError);  // before ToTensor
  CHECK_THROWS_AS(Normalize{}(ToTensor{}(image.narrow(0, 0, 1))), DataError);
}

TEST_CASE("Compose is an image's transform and a loader's") {
  const Compose evaluation{Resize{8}, CenterCrop{6}, ToTensor{}};
  at::Generator generator = rank_generator(1, 0);
  const at::Tensor image = picture(20, 16);
  const at::Tensor expected = ToTensor{}(CenterCrop{6}(Resize{8}(image)));
  CHECK(at::equal(evaluation(image, generator), expected));
  const Transform transform = evaluation;
  const Example example = transform({image, torch::tensor(4)}, generator);
  CHECK(at::equal(example.data, expected));
  CHECK(example.target.item<int>() == 4);

  // The draws are those of the steps, in their order.
  const Compose training{RandomResizedCrop{6}, RandomHorizontalFlip{}};
  at::Generator one = rank_generator(2, 0), other = rank_generator(2, 0);
  const at::Tensor part = training(image, one);
  CHECK(at::equal(part, RandomHorizontalFlip{}(RandomResizedCrop{6}(image, other), other)));
}

TEST_CASE("a transformed dataset draws by epoch and index, at any number of workers and ranks") {
  const TensorDataset pictures(torch::stack({picture(20, 16), picture(20, 16), picture(20, 16).flip(1)}),
                               torch::arange(3));
  TransformedDataset data{pictures, Compose{RandomResizedCrop{8}, ToTensor{}}, 5};
  const at::Tensor first = data.get(0).data, other = data.get(1).data;
  CHECK(data.size() == 3);
  CHECK(data.get(2).target.item<int>() == 2);
  CHECK(first.sizes() == at::IntArrayRef{3, 8, 8});
  CHECK(!at::equal(first, other));  // of equal pictures
  CHECK(at::equal(data.get(0).data, first));
  for (const int rank : {0, 1}) {
    DataLoader loader{lockstep::detail::DatasetView{data},
                      DistributedSampler{data.size(), rank, 2, {.shuffle = false}},
                      {.batch_size = 1, .num_workers = 2}};
    CHECK(at::equal(loader.begin()->data[0], rank == 0 ? first : other));
  }
  data.set_epoch(1);
  CHECK(!at::equal(data.get(0).data, first));
  TransformedDataset seeded{pictures, Compose{RandomResizedCrop{8}, ToTensor{}}, 6};
  CHECK(!at::equal(seeded.get(0).data, first));
}

}  // namespace image_transforms_test

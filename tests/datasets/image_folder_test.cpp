#include "lockstep/datasets/image_folder.hpp"

#include <atomic>
#include <cstdlib>
#include <thread>

#include "lockstep/data/loader.hpp"
#include "lockstep/data/sampler.hpp"
#include "lockstep/datasets/image_transforms.hpp"
#include "lockstep/interchange/state_dict.hpp"
#include "support/images.hpp"
#include "support/refuses.hpp"
#include "support/temporary_folder.hpp"
#include "support/written.hpp"

namespace image_folder_test {

using lockstep::DataError;
using lockstep::ImageFolder;
using lockstep::read_image;
using lockstep_test::jpeg_file;
using lockstep_test::png_file;

namespace {

// A smooth picture: JPEG keeps it almost unchanged.
std::vector<std::uint8_t> ramp(int width, int height, int channels) {
  std::vector<std::uint8_t> pixels;
  for (int y = 0; y < height; ++y)
    for (int x = 0; x < width; ++x)
      for (int c = 0; c < channels; ++c) pixels.push_back(static_cast<std::uint8_t>(4 * x + 3 * y + 20 * c));
  return pixels;
}

at::Tensor as_tensor(std::vector<std::uint8_t> pixels, int width, int height, int channels) {
  return torch::tensor(pixels, at::kByte).view({height, width, channels}).permute({2, 0, 1});
}

std::int64_t largest_difference(const at::Tensor& one, const at::Tensor& other) {
  REQUIRE(one.sizes() == other.sizes());
  return (one.to(at::kInt) - other.to(at::kInt)).abs().max().item<std::int64_t>();
}

void write(const std::filesystem::path& path, const std::string& bytes) {
  std::filesystem::create_directories(path.parent_path());
  std::ofstream(path, std::ios::binary) << bytes;
}

std::string grey_png(int size, int value) {
  return png_file(
      size, size,
      std::vector<std::uint8_t>(static_cast<std::size_t>(size * size), static_cast<std::uint8_t>(value)),
      PNG_FORMAT_GRAY);
}

}  // namespace

TEST_CASE("PNG images of several kinds are read to their values") {
  TemporaryFolder folder;
  const at::Tensor rgb = read_image(folder.write("rgb.png", png_file(20, 10, ramp(20, 10, 3))));
  CHECK(at::equal(rgb, as_tensor(ramp(20, 10, 3), 20, 10, 3)));
  CHECK(rgb.scalar_type() == at::kByte);

  const auto grey = folder.write("grey.png", png_file(20, 10, ramp(20, 10, 1), PNG_FORMAT_GRAY));
  CHECK(at::equal(read_image(grey), as_tensor(ramp(20, 10, 1), 20, 10, 1).expand({3, 10, 20})));

  // The colour of a transparent pixel counts as it is in the file.
  const auto rgba = folder.write("rgba.png", png_file(20, 10, ramp(20, 10, 4), PNG_FORMAT_RGBA));
  CHECK(at::equal(read_image(rgba), as_tensor(ramp(20, 10, 4), 20, 10, 4).narrow(0, 0, 3)));
}

TEST_CASE("JPEG images of several kinds are read") {
  TemporaryFolder folder;
  const at::Tensor rgb = read_image(folder.write("rgb.jpg", jpeg_file(20, 10, ramp(20, 10, 3))));
  CHECK(largest_difference(rgb, as_tensor(ramp(20, 10, 3), 20, 10, 3)) <= 6);

  const auto grey = folder.write("grey.jpg", jpeg_file(20, 10, ramp(20, 10, 1), JCS_GRAYSCALE));
  CHECK(largest_difference(read_image(grey), as_tensor(ramp(20, 10, 1), 20, 10, 1).expand({3, 10, 20})) <= 2);

  // An Adobe marker comes with it: the values are inverted, 255 is no ink.
  std::vector<std::uint8_t> ink;
  for (int i = 0; i < 64; ++i) ink.insert(ink.end(), {255, 128, 255, 200});
  const at::Tensor cmyk = read_image(folder.write("cmyk.jpg", jpeg_file(8, 8, ink, JCS_CMYK)));
  CHECK(largest_difference(cmyk,
                           torch::tensor({200, 100, 200}, at::kByte).view({3, 1, 1}).expand({3, 8, 8})) <= 2);
  // Pillow inverts them without the marker, too.
  CHECK(at::equal(read_image(folder.write("bare.jpg", jpeg_file(8, 8, ink, JCS_CMYK, false))), cmyk));
}

TEST_CASE("a CMYK JPEG of another program has Pillow's pixels") {
  const char* shared = std::getenv("LOCKSTEP_SHARED");
  const auto path = std::filesystem::path(shared ? shared : "") / "cases/cmyk_without_adobe_marker.jpg";
  if (!std::filesystem::exists(path)) {
    WARN("SKIPPED: LOCKSTEP_SHARED names no folder with cases/cmyk_without_adobe_marker.jpg");
    return;
  }
  CHECK(read_image(path).to(at::kLong).sum().item<std::int64_t>() == 777649);
}

TEST_CASE("16-bit grey is clipped, as Pillow does") {
  TemporaryFolder folder;
  const std::vector<std::uint16_t> grey{0, 1, 127, 128, 254, 255, 256, 300, 511, 32768, 65280, 65535};
  const auto clipped = torch::tensor({0, 1, 127, 128, 254, 255, 255, 255, 255, 255, 255, 255}, at::kByte);
  const auto path = folder.write("grey16.png", png_file(6, 2, grey, PNG_FORMAT_LINEAR_Y));
  CHECK(at::equal(read_image(path), clipped.view({2, 6}).expand({3, 2, 6})));
}

// tests/examples/imagenet_parity.py runs this case alone, and compares with Pillow and torchvision.
TEST_CASE("the images of a folder, as read and as resized, are saved for Python", "[.saved]") {
  const char* folder = std::getenv("LOCKSTEP_TEST_IMAGES");
  REQUIRE(folder != nullptr);
  c10::impl::GenericDict images(c10::StringType::get(), c10::TensorType::get());
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    const auto image = read_image(entry.path());
    images.insert(entry.path().filename().string(), image.contiguous());
    images.insert("resized " + entry.path().filename().string(),
                  lockstep::CenterCrop{56}(lockstep::Resize{64}(image)).contiguous());
  }
  lockstep::torch_save(c10::IValue(images), std::filesystem::path(folder) / "saved.pt");
}

TEST_CASE("the content decides between JPEG and PNG, not the name") {
  TemporaryFolder folder;
  const auto path = folder.write("picture.jpg", png_file(4, 4, ramp(4, 4, 3)));
  CHECK(at::equal(read_image(path), as_tensor(ramp(4, 4, 3), 4, 4, 3)));
}

TEST_CASE("an image that cannot be decoded is named with the reason") {
  TemporaryFolder folder;
  const auto error = [&](const std::string& name, const std::string& bytes) {
    const auto path = folder.write(name, bytes);
    const std::string text = text_of<DataError>([&] { read_image(path); });
    CHECK(text.starts_with(path.string() + ": "));
    return text.substr(std::min(text.size(), path.string().size() + 2));
  };
  const std::string jpeg = jpeg_file(40, 40, ramp(40, 40, 3)), png = png_file(40, 40, ramp(40, 40, 3));
  for (const std::size_t length : {std::size_t{4}, std::size_t{100}, jpeg.size() / 2})
    CHECK(error("cut.jpg", jpeg.substr(0, length)) == "cannot be decoded: Premature end of JPEG file");
  for (const std::size_t length : {std::size_t{8}, std::size_t{30}, png.size() / 2})
    CHECK(error("cut.png", png.substr(0, length)) == "cannot be decoded: the file ends early");
  refuses<DataError>([&] { read_image(folder.write("empty.jpg", "")); }, "empty.jpg': it is empty");
  CHECK(error("text.png", "no image") ==
        "offset 0: found neither the signature of a JPEG file nor that of a PNG file");
  std::string changed = png;
  changed[changed.size() - 20] ^= 0x55;
  refuses<DataError>([&] { read_image(folder.write("changed.png", changed)); }, "cannot be decoded: ");
  refuses<DataError>([&] { read_image(folder / "absent.png"); }, "absent.png': No such file");
  CHECK_THROWS_AS(read_image(folder.path()), DataError);

  // A few bytes promise 65,000 x 65,000 pixels.
  std::string vast = jpeg;
  const std::size_t frame = vast.find("\xff\xc0");
  REQUIRE(frame != std::string::npos);
  vast.replace(frame + 5, 4, "\xfd\xe8\xfd\xe8");
  CHECK(error("vast.jpg", vast) ==
        "found an image of 65000 x 65000 pixels, expected at most 178956970 pixels: scale it down");
}

TEST_CASE("a folder's classes and images come in torchvision's order") {
  TemporaryFolder folder;
  for (const std::string name : {"dog/b.png", "dog/a.PNG", "cat/z.png", "cat/more/a.png", "cat/more-1/b.png",
                                 "cat/more/deep/c.jpeg", "Zebra/1.jpg"})
    write(folder / name, grey_png(2, 7));
  write(folder / "cat/notes.txt", "no image");
  write(folder / "top.png", grey_png(2, 7));
  const ImageFolder images(folder.path());
  CHECK(images.classes() == std::vector<std::string>{"Zebra", "cat", "dog"});
  std::vector<std::string> names;
  std::vector<std::int64_t> targets;
  for (std::size_t i = 0; i < images.size(); ++i) {
    names.push_back(images.path(i).lexically_relative(folder.path()).string());
    targets.push_back(images.target(i));
    CHECK(images.get(i).target.item<std::int64_t>() == images.target(i));
  }
  CHECK(names == std::vector<std::string>{"Zebra/1.jpg", "cat/z.png", "cat/more/a.png", "cat/more-1/b.png",
                                          "cat/more/deep/c.jpeg", "dog/a.PNG", "dog/b.png"});
  CHECK(targets == std::vector<std::int64_t>{0, 1, 1, 1, 1, 2, 2});
}

TEST_CASE("a hidden folder is no class, and images that are not read are counted in one warning") {
  TemporaryFolder folder;
  for (const std::string name : {"cat/a.png", "dog/b.png"}) write(folder / name, grey_png(2, 7));
  std::filesystem::create_directories(folder / ".ipynb_checkpoints");
  CHECK(written(2, [&] {
          CHECK(ImageFolder(folder.path()).classes() == std::vector<std::string>{"cat", "dog"});
        }).empty());

  for (const std::string name : {"cat/c.webp", "cat/d.WEBP", "dog/e.tif", "dog/f.pgm", "dog/notes.txt"})
    write(folder / name, "");
  const std::string warning = written(2, [&] { CHECK(ImageFolder(folder.path()).size() == 2); });
  CHECK_THAT(warning, ContainsSubstring(": passed over 1 .pgm, 1 .tif, 2 .webp files"));
  CHECK(std::count(warning.begin(), warning.end(), '\n') == 1);

  write(folder / "emu/g.bmp", "");
  refuses<DataError>(
      [&] { ImageFolder images(folder.path()); },
      "emu: found no image, expected files that end in .jpg, .jpeg or .png; passed over 1 .bmp files");
}

TEST_CASE("images behind symbolic links are found") {
  TemporaryFolder folder, elsewhere;
  write(elsewhere / "a.png", grey_png(2, 1));
  std::filesystem::create_directories(folder / "one");
  std::filesystem::create_directory_symlink(elsewhere.path(), folder / "two");
  std::filesystem::create_symlink(elsewhere / "a.png", folder / "one/b.png");
  CHECK(ImageFolder(folder.path()).size() == 2);
}

TEST_CASE("a folder without classes or images is named") {
  TemporaryFolder folder;
  refuses<DataError>([&] { ImageFolder images(folder / "absent"); }, "absent: cannot be read: No such file");
  refuses<DataError>([&] { ImageFolder images(folder.path()); },
                     folder.path().string() + ": found no subfolder");
  std::filesystem::create_directories(folder / "cat");
  refuses<DataError>([&] { ImageFolder images(folder.path()); }, "cat: found no image");
}

TEST_CASE("several threads read one folder") {
  TemporaryFolder folder;
  for (int i = 0; i < 8; ++i) write(folder / ("c/" + std::to_string(i) + ".png"), grey_png(16, 10 * i));
  for (int i = 0; i < 8; ++i)
    write(folder / ("d/" + std::to_string(i) + ".jpg"), jpeg_file(16, 16, ramp(16, 16, 3)));
  const ImageFolder images(folder.path());
  std::vector<at::Tensor> alone;
  for (std::size_t i = 0; i < images.size(); ++i) alone.push_back(images.get(i).data);
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([&, copy = images] {
      for (std::size_t i = 0; i < copy.size(); ++i) wrong += at::equal(copy.get(i).data, alone[i]) ? 0 : 1;
    });
  for (auto& thread : threads) thread.join();
  CHECK(wrong == 0);
}

TEST_CASE("an epoch of random crops is the same with any number of workers, and another in the next epoch") {
  using namespace lockstep;
  TemporaryFolder folder;
  for (int i = 0; i < 9; ++i)
    write(folder / ("c/" + std::to_string(i) + ".png"), png_file(30 + i, 25, ramp(30 + i, 25, 3)));
  const ImageFolder images(folder.path());
  const auto passes = [&](std::int64_t workers) {
    DataLoader loader{
        images,
        DistributedSampler{images.size(), 1, 2},
        {.batch_size = 2,
         .num_workers = workers,
         .transform = Compose{RandomResizedCrop{16}, RandomHorizontalFlip{}, ToTensor{}, Normalize{}},
         .seed = 5}};
    std::vector<at::Tensor> epochs;
    for (std::size_t epoch = 0; epoch < 2; ++epoch) {
      loader.set_epoch(epoch);
      std::vector<at::Tensor> batches;
      for (auto& batch : loader) batches.push_back(batch.data);
      epochs.push_back(at::cat(batches));
    }
    return epochs;
  };
  const auto alone = passes(0), with_three = passes(3);
  REQUIRE(alone[0].sizes() == at::IntArrayRef{5, 3, 16, 16});
  CHECK(at::equal(alone[0], with_three[0]));
  CHECK(at::equal(alone[1], with_three[1]));
  CHECK(!at::equal(alone[0], alone[1]));
}

TEST_CASE("a loader's error names the file of the damaged image") {
  using namespace lockstep;
  TemporaryFolder folder;
  write(folder / "c/good.png", grey_png(8, 1));
  write(folder / "c/bad.png", grey_png(8, 1).substr(0, 40));
  const ImageFolder images(folder.path());
  for (const std::int64_t workers : {0, 2}) {
    DataLoader loader{images,
                      EvaluationSampler{images.size(), 0, 1},
                      {.num_workers = workers, .transform = Compose{Resize{8}, CenterCrop{8}, ToTensor{}}}};
    CHECK(text_of<DataError>([&] { loader.begin(); }) ==
          (folder / "c/bad.png").string() + ": cannot be decoded: the file ends early");
  }
}

}  // namespace image_folder_test

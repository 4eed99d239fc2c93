#include "lockstep/datasets/idx.hpp"

#include <fstream>

#include "support/catch.hpp"
#include "support/temporary_folder.hpp"
#include "support/text_of.hpp"

namespace idx_test {

using lockstep::DataError;
using lockstep::read_idx;

namespace {

std::string header(char type, std::initializer_list<std::uint32_t> sizes) {
  std::string bytes{'\0', '\0', type, static_cast<char>(sizes.size())};
  for (const auto size : sizes)
    for (int shift = 24; shift >= 0; shift -= 8) bytes += static_cast<char>(size >> shift & 0xff);
  return bytes;
}

std::string gzipped(const std::string& bytes) {
  z_stream stream{};
  REQUIRE(deflateInit2(&stream, 9, Z_DEFLATED, 15 + 16, 8, Z_DEFAULT_STRATEGY) == Z_OK);
  std::string out(bytes.size() + 100, '\0');
  stream.next_in = reinterpret_cast<unsigned char*>(const_cast<char*>(bytes.data()));
  stream.avail_in = static_cast<uInt>(bytes.size());
  stream.next_out = reinterpret_cast<unsigned char*>(out.data());
  stream.avail_out = static_cast<uInt>(out.size());
  REQUIRE(deflate(&stream, Z_FINISH) == Z_STREAM_END);
  out.resize(out.size() - stream.avail_out);
  deflateEnd(&stream);
  return out;
}

/// Checks that reading `path` fails with these words, where it has any.
void refused(const std::filesystem::path& path, const std::string& words,
             const lockstep::IdxExpectation& expected = {}) {
  CHECK_THAT(text_of<DataError>([&] { read_idx(path, expected); }), ContainsSubstring(words));
}

}  // namespace

TEST_CASE("an IDX file of each type, plain and gzipped, is read to its values") {
  TemporaryFolder folder;
  const std::string bytes = header(0x08, {2, 3}) + std::string("\x00\x01\x7f\x80\xfe\xff", 6);
  const at::Tensor expected = torch::tensor({0, 1, 127, 128, 254, 255}, at::kByte).view({2, 3});
  CHECK(at::equal(read_idx(folder.write("plain", bytes)), expected));
  CHECK(at::equal(read_idx(folder.write("zipped", gzipped(bytes))), expected));

  CHECK(at::equal(read_idx(folder.write("i8", header(0x09, {2}) + "\xff\x05")),
                  torch::tensor({-1, 5}, at::kChar)));
  CHECK(at::equal(read_idx(folder.write("i16", header(0x0B, {2}) + std::string("\xff\xfe\x01\x00", 4))),
                  torch::tensor({-2, 256}, at::kShort)));
  CHECK(at::equal(read_idx(folder.write("i32", header(0x0C, {1}) + std::string("\x00\x01\x00\x02", 4))),
                  torch::tensor({65538}, at::kInt)));
  CHECK(at::equal(read_idx(folder.write("f32", header(0x0D, {1}) + std::string("\x3f\xc0\x00\x00", 4))),
                  torch::tensor({1.5F})));
  CHECK(at::equal(
      read_idx(folder.write("f64", header(0x0E, {1}) + std::string("\xc0\x04\x00\x00\x00\x00\x00\x00", 8))),
      torch::tensor({-2.5}, at::kDouble)));
}

TEST_CASE("any number of dimensions and any size fit") {
  TemporaryFolder folder;
  CHECK(read_idx(folder.write("scalar", header(0x08, {}) + "\x07")).item<int>() == 7);
  CHECK(read_idx(folder.write("none", header(0x08, {0, 28, 28}))).sizes() == at::IntArrayRef({0, 28, 28}));
  CHECK(read_idx(folder.write("five", header(0x08, {1, 2, 1, 2, 2}) + "abcdefgh")).sizes() ==
        at::IntArrayRef({1, 2, 1, 2, 2}));
  // Two streams one after the other are one gzip file.
  CHECK(read_idx(folder.write("parts", gzipped(header(0x08, {4})) + gzipped("abcd"))).numel() == 4);
}

TEST_CASE("what is written is read back") {
  TemporaryFolder folder;
  const at::Tensor tensor = torch::randint(256, {70, 5, 3}, at::kByte);
  lockstep::write_idx(folder / "t", tensor);
  CHECK(at::equal(read_idx(folder / "t"), tensor));
  CHECK_THROWS_AS(lockstep::write_idx(folder / "absent" / "t", tensor), DataError);
}

TEST_CASE("a file that is not what it should be is refused with file, offset and expectation") {
  TemporaryFolder folder;
  const std::string good = header(0x08, {2, 3}) + "abcdef";

  refused(folder / "absent", "absent");
  refused(folder.path(), "it is a folder");
  refused(folder.write("empty", ""), "empty");
  refused(folder.write("text", "hello, world"),
          "text: offset 0: found bytes 68 65 6c 6c, expected the beginning of an IDX file");
  refused(folder.write("type", header(0x0A, {1}) + "a"), "offset 0: found bytes");
  refused(folder.write("sizes", good.substr(0, 7)), "offset 7: found the end");
  refused(folder.write("short", good.substr(0, 15)),
          "a header that promises 2x3 uint8 elements, expected at most the 15 bytes");
  refused(folder.write("long", good + "x"), "offset 18: found more bytes");
  refused(folder.write("vast", header(0x0E, {4000000000, 4000000000, 4000000000, 4000000000})),
          "a header that promises");
  // Empty, but the strides of such a tensor are beyond 64 bits.
  refused(folder.write("strides", header(0x08, {0, 0xffffffff, 0xffffffff, 0xffffffff})),
          "offset 4: found the sizes 0x4294967295x4294967295x4294967295");
  refused(folder.write("bytes", header(0x0E, {0xffffffff, 0, 0x7fffffff})),
          "offset 4: found the sizes 4294967295x0x2147483647, expected");
  CHECK(read_idx(folder.write("wide", header(0x08, {0, 0xffffffff, 0x7fffffff}))).numel() == 0);
  refused(folder.write("good", good), "offset 3: found 2 dimensions, expected labels, which have 1",
          {.dimensions = 1, .content = "labels"});
  refused(folder / "good", "offset 2: found uint8 elements, expected weights of float32",
          {.dtype = at::kFloat, .content = "weights"});
}

TEST_CASE("damaged gzip data are refused") {
  TemporaryFolder folder;
  std::string bytes = header(0x08, {2000});
  for (int i = 0; i < 2000; ++i) bytes += static_cast<char>(i * i % 251);
  const std::string zipped = gzipped(bytes);

  refused(folder.write("cut", zipped.substr(0, zipped.size() / 2)), "the gzip data end early");
  // Cut inside the checksum behind the data: every element is there, and yet the file is not whole.
  refused(folder.write("sum", zipped.substr(0, zipped.size() - 2)), "the gzip data end early");
  std::string flipped = zipped;
  flipped[flipped.size() / 2] ^= 0x10;
  refused(folder.write("flipped", flipped), "gzip data");
  refused(folder.write("short", gzipped(bytes.substr(0, 1500))),
          "offset 1500: found the end of the file, expected 2008 bytes in all");
  refused(folder.write("long", gzipped(bytes + "x")),
          "offset 2008: found more bytes, expected the end of the file after 2000 uint8");
}

TEST_CASE("zeros after gzip data are skipped, other bytes are named") {
  TemporaryFolder folder;
  const std::string begin = header(0x08, {4}), whole = gzipped(begin + "abcd"), first = gzipped(begin + "ab");
  const auto padded = [](const std::string& bytes, std::size_t zeros) {
    return bytes + std::string(zeros, '\0');
  };
  for (const std::size_t zeros : {1, 512, 200000}) {
    INFO(zeros);
    CHECK(read_idx(folder.write("padded", padded(whole, zeros))).numel() == 4);
    CHECK(read_idx(folder.write("parts", padded(first, zeros) + gzipped("cd"))).numel() == 4);
  }
  // The member's two first bytes are read at once, or one by one.
  for (const std::size_t length : {65535, 65536})
    CHECK(read_idx(folder.write("parts", padded(first, length - first.size()) + gzipped("cd"))).numel() == 4);

  const auto after = [&](const std::string& content, std::size_t offset, int bytes) {
    refused(folder.write("tail", content),
            fmt::format("tail: offset {}: found {} bytes after the gzip data", offset, bytes));
  };
  after(whole + "garbage", whole.size(), 7);
  after(padded(whole, 3) + "\x1f", whole.size() + 3, 1);
  after(padded(whole, 70000) + std::string(70000, 'x'), whole.size() + 70000, 70000);
  refused(folder.write("cut", first + gzipped("cd").substr(0, 7)), "the gzip data end early");
}

}  // namespace idx_test

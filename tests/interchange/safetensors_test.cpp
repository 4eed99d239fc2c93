// safetensors files: written, read, and every kind of damage refused.
#include "lockstep/interchange/safetensors.hpp"
#include "lockstep/interchange/state_dict.hpp"

#include <torch/torch.h>
#include <algorithm>
#include <string>

#include "support/catch.hpp"
#include "support/temporary_folder.hpp"
#include "support/text_of.hpp"

namespace safetensors_test {

namespace {

// A file with that header and data.
std::string file_of(const std::string& header, const std::string& data = "") {
  std::string bytes;
  for (int i = 0; i < 8; ++i) bytes += static_cast<char>(header.size() >> 8 * i & 0xFF);
  return bytes + header + data;
}

// The error that reading these bytes ends with; empty if they are read.
std::string refusal(const std::string& bytes) {
  return text_of<lockstep::CheckpointError>(
      [&] { lockstep::deserialize_safetensors(bytes, "a.safetensors"); });
}

void says(const std::string& text, const std::string& words) {
  CHECK_THAT(text, ContainsSubstring(words));
}

lockstep::StateDict small() {
  return {{"flag", torch::tensor({true, false, true})},
          {"weight", torch::arange(6, torch::kFloat).view({2, 3}).t()},
          {"none", torch::zeros({0, 3})},
          {"scalar", torch::tensor(2.5, torch::kDouble)}};
}

}  // namespace

TEST_CASE("what save_safetensors writes, load_safetensors reads: all dtypes, shapes, names and metadata") {
  const TemporaryFolder folder;
  lockstep::StateDict entries = small();
  std::vector<at::ScalarType> types{at::kHalf,        at::kBFloat16,        at::kLong,
                                    at::kInt,         at::kShort,           at::kChar,
                                    at::kByte,        at::kComplexFloat,    at::kUInt16,
                                    at::kUInt32,      at::kUInt64,          at::kFloat8_e4m3fn,
                                    at::kFloat8_e5m2, at::kFloat8_e4m3fnuz, at::kFloat8_e5m2fnuz};
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 7
  types.push_back(at::ScalarType::Float8_e8m0fnu);
#endif
  for (const auto type : types)
    entries.push_back({std::string("of ") + c10::toString(type), torch::arange(5).to(type)});
  entries.push_back({"quote \" backslash \\ line\n tab\t \xC3\xBC \xF0\x9F\x98\x80", torch::ones({1})});
  const lockstep::SafetensorsMetadata metadata{{"format", "pt"}, {"note", "a \"b\"\x01"}};
  lockstep::save_safetensors(entries, folder / "a.safetensors", metadata);
  const lockstep::Safetensors read = lockstep::load_safetensors(folder / "a.safetensors");
  CHECK(read.metadata == metadata);
  REQUIRE(read.tensors.size() == entries.size());
  for (const auto& entry : entries) {
    const auto found = std::find_if(read.tensors.begin(), read.tensors.end(),
                                    [&](const auto& one) { return one.name == entry.name; });
    REQUIRE(found != read.tensors.end());
    CHECK(found->tensor.dtype() == entry.tensor.dtype());
    CHECK(torch::equal(found->tensor.flatten().view(at::kByte), entry.tensor.flatten().view(at::kByte)));
  }
}

// What safetensors.torch.save_file 0.8.0 writes of arange(6, dtype=uint8) as float4 of shape [2, 3] and of arange(3) as
// float8_e4m3fnuz.
TEST_CASE("float8 and float4 are read as Python has written them, and written so") {
  using namespace std::string_literals;
  const auto read = [](const std::string& fields, const std::string& data) {
    return lockstep::deserialize_safetensors(file_of(fields, data), "a").tensors;
  };
  const auto float8 =
      read(R"({"f":{"dtype":"F8_E4M3FNUZ","shape":[3],"data_offsets":[0,3]}})", "\0\1\2"s)[0].tensor;
  CHECK(float8.scalar_type() == at::kFloat8_e4m3fnuz);
  CHECK(float8.view(at::kByte).equal(torch::arange(3, at::kByte)));
  const auto float8_of = [&](const char* dtype, const char* byte) {
    const auto fields = fmt::format(R"({{"a":{{"dtype":"{}","shape":[1],"data_offsets":[0,1]}}}})", dtype);
    return read(fields, std::string(byte, 1))[0].tensor.to(at::kFloat).item<float>();
  };
  CHECK(float8_of("F8_E4M3", "\x38") == 1);
  CHECK(float8_of("F8_E5M2", "\x3C") == 1);
  CHECK(float8_of("F8_E4M3FNUZ", "\x40") == 1);
  CHECK(float8_of("F8_E5M2FNUZ", "\x40") == 1);
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 7
  CHECK(float8_of("F8_E8M0", "\x7F") == 1);
  CHECK(float8_of("F8_E8M0", "\x80") == 2);
#endif
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 8
  const std::string fields = R"({"a":{"dtype":"F4","shape":[2,6],"data_offsets":[0,6]}})";
  const auto entries = read(fields, "\0\1\2\3\4\5"s);
  const auto float4 = at::ScalarType::Float4_e2m1fn_x2;
  CHECK(entries[0].tensor.sizes().equals({2, 3}));
  CHECK(entries[0].tensor.scalar_type() == float4);
  CHECK(entries[0].tensor.view(at::kByte).equal(torch::arange(6, at::kByte).view({2, 3})));
  const std::string written = lockstep::serialize_safetensors(entries, {});
  CHECK(lockstep::deserialize_safetensors(written, "a").tensors[0].tensor.sizes().equals({2, 3}));
  CHECK(written.ends_with("\0\1\2\3\4\5"s));
  const auto wide = torch::arange(64 * 64, at::kByte).view({64, 64});
  const std::string turned = lockstep::serialize_safetensors({{"a", wide.view(float4).t()}}, {});
  CHECK(lockstep::deserialize_safetensors(turned, "a").tensors[0].tensor.view(at::kByte).equal(wide.t()));
  // Half an element at the end of each row: nobody can ask for the tensor.
  const auto halves = read(R"({"a":{"dtype":"F4","shape":[4,3],"data_offsets":[0,6]}})", "\0\1\2\3\4\5"s);
  CHECK(!halves[0].tensor.defined());
  // LibTorch converts it to nothing: a model that asks for it stays as it was.
  torch::nn::Linear model(2, 2);
  const auto before = model->bias.detach().clone();
  const auto taken = read(R"({"bias":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},)"
                          R"("weight":{"dtype":"F4","shape":[2,4],"data_offsets":[8,12]}})",
                          std::string(12, '\1'));
  CHECK_THROWS_AS(lockstep::load_state_dict(*model, taken), lockstep::CheckpointError);
  CHECK(model->bias.equal(before));
  CHECK_THROWS_AS(read(R"({"a":{"dtype":"F4","shape":[3],"data_offsets":[0,2]}})", "\0\1"s),
                  lockstep::CheckpointError);
  CHECK_THROWS_AS(read(R"({"a":{"dtype":"F4","shape":[],"data_offsets":[0,1]}})", "\0"s),
                  lockstep::CheckpointError);
  CHECK_THROWS_AS(lockstep::serialize_safetensors({{"a", torch::zeros({}, at::kByte).view(float4)}}, {}),
                  lockstep::UsageError);
#endif
}

TEST_CASE("a tensor of a dtype that LibTorch does not have matters only to who asks for it") {
  const auto read = lockstep::deserialize_safetensors(
      file_of(R"({"a":{"dtype":"F6_E2M3","shape":[8],"data_offsets":[0,6]},)"
              R"("weight":{"dtype":"F32","shape":[1,1],"data_offsets":[6,10]}})",
              std::string(10, '\1')),
      "a");
  REQUIRE(read.tensors.size() == 2);
  CHECK(!read.tensors[0].tensor.defined());
  torch::nn::Linear model(torch::nn::LinearOptions(1, 1).bias(false));
  lockstep::load_state_dict(model, read.tensors, {.strict = false});
  CHECK(model->weight.item<float>() == read.tensors[1].tensor.item<float>());
  CHECK_THROWS_AS(lockstep::load_state_dict(model, lockstep::StateDict{{"weight", {}}}),
                  lockstep::CheckpointError);
}

TEST_CASE("an empty safetensors file is one of no tensors") {
  CHECK(lockstep::deserialize_safetensors(lockstep::serialize_safetensors({}, {}), "a").tensors.empty());
}

TEST_CASE("save_safetensors refuses what the format cannot hold, and writes nothing") {
  const TemporaryFolder folder;
  for (const auto& refused : std::vector<std::pair<lockstep::StateDict, const char*>>{
           {{{"a", torch::ones(1)}, {"a", torch::ones(1)}}, "\"a\" is taken"},
           {{{"__metadata__", torch::ones(1)}}, "\"__metadata__\" is taken"},
           {{{"c", torch::ones(1, torch::kComplexDouble)}}, "complex128"},
           {{{"s", torch::eye(2).to_sparse()}}, "sparse"},
           {{{"\xFF", torch::ones(1)}}, "UTF-8"}})
    says(text_of<lockstep::UsageError>([&] { lockstep::save_safetensors(refused.first, folder / "a"); }),
         refused.second);
  CHECK(folder.files() == 0);
}

TEST_CASE("hostile safetensors headers are refused with the reason") {
  const std::string four(4, '\0');
  const auto entry = [](const std::string& fields) { return "{\"a\":{" + fields + "}}"; };
  const std::string good = R"("dtype":"F32","shape":[1],"data_offsets":[0,4])";
  REQUIRE(refusal(file_of(entry(good), four)).empty());
  REQUIRE(refusal(file_of(" \n" + entry(good), four)) != "");
  REQUIRE(refusal(file_of(entry(good) + "  \n", four)).empty());

  const auto refused = [&](const std::string& bytes, const std::string& why) {
    INFO(bytes);
    const std::string text = refusal(bytes);
    CHECK(text.starts_with("'a.safetensors' ("));
    says(text, why);
  };
  refused("", "begins with the 8 bytes");
  refused(std::string(8, '\xFF'), "more than 100000000");
  refused(std::string("\x01\xE1\xF5\x05\0\0\0\0", 8), "its header has 100000001 bytes, more than 100000000");
  refused(std::string("\x09\0\0\0\0\0\0\0{}", 10), "of which the file has 2");
  refused(file_of(""), "it does not begin with '{'");
  refused(file_of("[]"), "it does not begin with '{'");
  refused(file_of("{} {}"), "expected end of input");
  refused(file_of(entry(good + "," + good), four), "\"dtype\" is repeated");
  refused(file_of("{\"a\":{" + good + "},\"a\":{" + good + "}}", four), "\"a\" is repeated");
  refused(file_of(R"({"__metadata__":{},"__metadata__":{}})"), "is repeated");
  refused(file_of(R"({"__metadata__":{"a":1}})"), "the metadata \"a\" is no string");
  refused(file_of(R"({"__metadata__":{"a\u0062":"","ab":""}})"), "\"ab\" is repeated");
  refused(file_of(entry(good + R"(,"more":1)"), four), "unknown key \"more\"");
  refused(file_of(entry(R"("dtype":"F32","shape":[1])"), four), "no dtype, shape and two data_offsets");
  refused(file_of(entry(R"("dtype":"F32","shape":[2],"data_offsets":[0,4])"), four), "do not fit");
  refused(file_of(entry(R"("dtype":"F32","shape":[1],"data_offsets":[4,0])"), four), "do not fit");
  refused(file_of(entry(R"("dtype":"F32","shape":[-1],"data_offsets":[0,4])"), four), "whole number");
  refused(file_of(entry(R"("dtype":"F32","shape":[1.0],"data_offsets":[0,4])"), four), "whole number");
  refused(file_of(entry(R"("dtype":"F32","shape":[01],"data_offsets":[0,4])"), four), "expected ']'");
  refused(file_of(entry(R"("dtype":"F32","shape":[9223372036854775808],"data_offsets":[0,4])"), four),
          "whole number");
  // 4 * 2^31 * 2^31 is 0 in 64 bits, and so is the product of these two with 0 between them.
  refused(file_of(entry(R"("dtype":"F32","shape":[2147483648,2147483648],"data_offsets":[0,0])")),
          "do not fit");
  refused(file_of(entry(R"("dtype":"F32","shape":[4611686018427387904,0,16],"data_offsets":[0,0])")),
          "do not fit");
  refused(file_of(entry(R"("dtype":"F32","shape":[1],"data_offsets":[4,8])"), four + four),
          "gap or an overlap");
  refused(file_of("{\"a\":{" + good + "},\"b\":{" + good + "}}", four), "gap or an overlap");
  refused(file_of(entry(good), four + "x"), "trailing bytes");
  refused(file_of(entry(good), "123"), "cut short");
  refused(file_of(entry(R"("dtype":"BOOL","shape":[4],"data_offsets":[0,4])"), "\x01\x02\x01\x01"),
          "neither 0 nor 1");
  refused(file_of("{\"\xC0\xAF\":{" + good + "}}", four), "syntax error");
  refused(file_of("{\"a\n\":{" + good + "}}", four), "control character");
  refused(file_of(R"({"\ud800":{)" + good + "}}", four), "surrogate");
  refused(file_of(R"({"\x":{)" + good + "}}", four), "forbidden character after backslash");
  std::string deep = "{\"a\":";
  for (int i = 0; i < 100'000; ++i) deep += "{\"a\":";
  refused(file_of(deep), "no object of strings and lists");
}

TEST_CASE("a safetensors file cut anywhere is refused; one with any byte changed is refused or read") {
  const std::string good = lockstep::serialize_safetensors(small());
  REQUIRE(refusal(good).empty());
  for (std::size_t length = 0; length < good.size(); ++length) {
    INFO("cut to " << length << " of " << good.size());
    CHECK(!refusal(good.substr(0, length)).empty());
  }
  const std::size_t data = 3 + 24 + 8;
  std::size_t read = 0;
  for (std::size_t at = 0; at < good.size(); ++at)
    for (const int value :
         {0, 1, 0x20, 0x22, 0x30, 0x39, 0x5C, 0x7B, 0x7D, 0x7F, 0x80, 0xFF, good[at] ^ 1, good[at] ^ 0x80}) {
      std::string changed = good;
      changed[at] = static_cast<char>(value);
      if (!refusal(changed).empty()) continue;
      ++read;
      // What is read has as many elements as the file has bytes for, whatever the change.
      std::size_t bytes = 0;
      for (const auto& entry : lockstep::deserialize_safetensors(changed, "a").tensors)
        bytes += entry.tensor.defined() ? entry.tensor.nbytes() : data;  // of an unknown dtype
      if (bytes < data) FAIL_CHECK("byte " << at << " as " << value);
    }
  CHECK(read > 0);
}

}  // namespace safetensors_test

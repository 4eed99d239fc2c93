// State dicts of models and optimizers, and the files of Python's torch.save.
#include "lockstep/interchange/state_dict.hpp"
#include "lockstep/interchange/run_state_dict.hpp"

#include <torch/torch.h>
#include <cstdint>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/comm/local_comm.hpp"
#include "lockstep/data/sampler.hpp"
#include "lockstep/optim/optimizers.hpp"
#include "lockstep/precision/precision.hpp"
#include "lockstep/train/extras.hpp"
#include "lockstep/train/trainer.hpp"
#include "support/catch.hpp"
#include "support/temporary_folder.hpp"
#include "support/text_of.hpp"
#include "support/written.hpp"
#include "train/nets.hpp"

namespace state_dict_test {

namespace {

std::vector<std::string> names_of(const lockstep::StateDict& entries) {
  std::vector<std::string> names;
  for (const auto& entry : entries) names.push_back(entry.name);
  return names;
}

void says(const std::string& text, const std::vector<std::string>& words) {
  for (const std::string& each : words) CHECK_THAT(text, ContainsSubstring(each));
}

template <class Error = lockstep::CheckpointError, class Act>
void refuses(Act&& act, const std::vector<std::string>& words) {
  says(text_of<Error>(act), words);
}

bool equal(const lockstep::StateDict& a, const lockstep::StateDict& b) {
  bool same = names_of(a) == names_of(b);
  for (std::size_t i = 0; same && i < a.size(); ++i) same = torch::equal(a[i].tensor, b[i].tensor);
  return same;
}

// A file of torch.save with that pickle and a storage of two floats.
std::string file_of(const std::string& pickle, const std::string& storage = std::string(8, '\0')) {
  std::string bytes;
  caffe2::serialize::PyTorchStreamWriter archive([&](const void* data, std::size_t size) {
    bytes.append(static_cast<const char*>(data), size);
    return size;
  });
  archive.writeRecord("data.pkl", pickle.data(), pickle.size());
  archive.writeRecord("data/0", storage.data(), storage.size());
  archive.writeEndOfFile();
  return bytes;
}

c10::IValue read(const std::string& pickle) {
  return lockstep::unpickle_state(file_of("\x80\x02" + pickle), "a.pt");
}

// The pickle of a float tensor with that offset, shape and strides.
std::string tensor_pickle(const std::string& offset, const std::string& shape, const std::string& strides,
                          const std::string& count = "K\x02", const std::string& key = "0",
                          const std::string& type = "FloatStorage") {
  const auto text = [](const std::string& word) {
    return "X" + std::string(1, static_cast<char>(word.size())) + std::string(3, '\0') + word;
  };
  return "ctorch._utils\n_rebuild_tensor_v2\n((" + text("storage") + "ctorch\n" + type + "\n" + text(key) +
         text("cpu") + count + "tQ" + offset + shape + strides + "\x89" + "ccollections\nOrderedDict\n)RtR.";
}

template <class Optimizer>
void step(TinyNet& model, Optimizer& optimizer) {
  optimizer.zero_grad();
  torch::manual_seed(5);
  model->forward(torch::randn({7, 6})).pow(2).sum().backward();
  optimizer.step();
}

}  // namespace

TEST_CASE(
    "a model's state dict has Python's order: a module before its children, parameters before buffers") {
  TinyNet model;
  CHECK(names_of(lockstep::state_dict(model)) ==
        std::vector<std::string>{"hidden.weight", "hidden.bias", "norm.weight", "norm.bias",
                                 "norm.running_mean", "norm.running_var", "norm.num_batches_tracked",
                                 "last.weight", "last.bias"});
  const auto entries = lockstep::state_dict(model, "module.");
  CHECK(entries[0].name == "module.hidden.weight");
  CHECK(entries[0].tensor.const_data_ptr() == model->hidden->weight.const_data_ptr());
  CHECK(!entries[0].tensor.requires_grad());
}

TEST_CASE("a tied tensor is in a state dict under each name, and shares its storage in the file") {
  const TemporaryFolder folder;
  struct Tied : torch::nn::Module {
    Tied() {
      weight = register_parameter("weight", torch::ones({100}));
      register_parameter("again", weight);
    }
    torch::Tensor weight;
  };
  Tied model;
  lockstep::torch_save(lockstep::state_dict(model), folder / "a.pt");
  const auto read = lockstep::entries_of(lockstep::torch_load(folder / "a.pt"));
  CHECK(names_of(read) == std::vector<std::string>{"weight", "again"});
  CHECK(read[0].tensor.const_data_ptr() == read[1].tensor.const_data_ptr());
}

TEST_CASE("load_state_dict accepts module. if all names have it, and converts dtypes") {
  TinyNet saved, model;
  lockstep::load_state_dict(model, lockstep::state_dict(saved, "module."));
  CHECK(equal(lockstep::state_dict(saved), lockstep::state_dict(model)));

  auto entries = lockstep::state_dict(saved, "module.");
  entries[0].tensor = entries[0].tensor.to(torch::kDouble);
  entries[8].tensor = entries[8].tensor.to(torch::kBFloat16);
  lockstep::load_state_dict(model, lockstep::dict_of(entries));
  CHECK(model->last->bias.dtype() == torch::kFloat);
  CHECK(torch::equal(model->last->bias.detach(), entries[8].tensor.to(torch::kFloat)));

  entries[3].name = "norm.bias";  // not all: Python refuses this one, too
  CHECK_THROWS_AS(lockstep::load_state_dict(model, entries), lockstep::CheckpointError);
}

TEST_CASE("a model whose only child is called module is loaded from its own names and from Python's DDP") {
  struct OnlyChild : torch::nn::Module {
    OnlyChild() { register_module("module", torch::nn::Linear(2, 3)); }
  };
  const OnlyChild saved;
  for (const char* prefix : {"", "module."}) {
    INFO(prefix);
    OnlyChild model;
    lockstep::load_state_dict(model, lockstep::state_dict(saved, prefix));
    CHECK(equal(lockstep::state_dict(saved), lockstep::state_dict(model)));
  }
  OnlyChild model;
  auto entries = lockstep::state_dict(saved, "module.");
  entries[1].name = "module.module.other";
  CHECK(lockstep::load_state_dict(model, entries, {.strict = false}).unexpected_keys ==
        std::vector<std::string>{"module.module.weight", "module.module.other"});
}

TEST_CASE("missing, unexpected and misshapen entries are refused together, and the model is unchanged") {
  TinyNet saved, model;
  const auto before = model->norm->weight.clone();
  auto entries = lockstep::state_dict(saved);
  entries[2].tensor = torch::full({8}, 3.0);
  entries.erase(entries.begin());
  entries.pop_back();
  entries.push_back({"more.weight", torch::ones({1})});
  entries.push_back({"more.bias", torch::ones({1})});
  entries[4].tensor = torch::ones({9});                        // norm.running_var
  entries[6].tensor = torch::ones({3, 8}, at::kComplexFloat);  // last.weight
  const auto refused = [&](bool strict, const std::string& words) {
    refuses([&] { lockstep::load_state_dict(model, entries, {.strict = strict}); }, {words});
  };
  refused(true, R"(: missing "hidden.weight", "last.bias"; unexpected "more.weight", "more.bias"; )"
                R"("norm.running_var" is [9] float32 in the state dict and [8] float32 in the model; )"
                R"("last.weight" is [3, 8] complex64)");
  CHECK(torch::equal(model->norm->weight, before));
  refused(false, R"(does not fit the model: "norm.running_var" is )");

  entries = lockstep::state_dict(saved);
  entries.erase(entries.begin());
  entries.push_back({"more", torch::ones({1})});
  const auto keys = lockstep::load_state_dict(model, entries, {.strict = false});
  CHECK(keys.missing_keys == std::vector<std::string>{"hidden.weight"});
  CHECK(keys.unexpected_keys == std::vector<std::string>{"more"});

  entries.back().name = entries.front().name;
  refused(false, R"(given twice "hidden.bias")");
}

TEST_CASE("an optimizer's state dict restores it in another, of lockstep or of LibTorch") {
  TinyNet first, second;
  const auto check = [&](auto& a, auto& b) {
    for (int i = 0; i < 3; ++i) step(first, a);
    lockstep::load_state_dict(second, lockstep::state_dict(first));
    lockstep::load_state_dict(b,
                              lockstep::unpickle_state(lockstep::pickle_state(lockstep::state_dict(a)), "a"));
    for (int i = 0; i < 2; ++i) {
      step(first, a);
      step(second, b);
    }
    CHECK(equal(lockstep::state_dict(first), lockstep::state_dict(second)));
  };
  SECTION("SGD") {
    lockstep::SGD a(first->parameters(),
                    {.lr = 0.01, .momentum = 0.9, .weight_decay = 0.1, .nesterov = true});
    lockstep::SGD b(second->parameters());
    check(a, b);
    CHECK(b.options().nesterov);
  }
  SECTION("Adam") {
    lockstep::Adam a(first->parameters(), {.lr = 0.01, .betas = {0.8, 0.95}, .amsgrad = true});
    lockstep::Adam b(second->parameters());
    check(a, b);
  }
  SECTION("AdamW") {
    lockstep::AdamW a(first->parameters(), {.lr = 0.01}), b(second->parameters());
    check(a, b);
  }
  SECTION("torch::optim::SGD") {
    torch::optim::SGD a(first->parameters(), torch::optim::SGDOptions(0.01).momentum(0.9));
    torch::optim::SGD b(second->parameters(), torch::optim::SGDOptions(0.5));
    check(a, b);
  }
  SECTION("torch::optim::Adam") {
    torch::optim::Adam a(first->parameters(), torch::optim::AdamOptions(0.01).amsgrad(true));
    torch::optim::Adam b(second->parameters());
    check(a, b);
  }
  SECTION("torch::optim::AdamW") {
    torch::optim::AdamW a(first->parameters(), torch::optim::AdamWOptions(0.01));
    torch::optim::AdamW b(second->parameters());
    check(a, b);
  }
}

TEST_CASE("an optimizer's dict that does not fit is refused with all reasons, and nothing is changed") {
  TinyNet model;
  lockstep::Adam adam(model->parameters());
  lockstep::SGD sgd(model->parameters(), {.momentum = 0.9});
  step(model, adam);
  step(model, sgd);
  const auto refused = [](auto& optimizer, const c10::IValue& dict, const std::vector<std::string>& words) {
    refuses([&] { lockstep::load_state_dict(optimizer, dict); }, words);
  };
  const auto saved = [&](auto& optimizer) {  // a copy that can be changed
    return lockstep::unpickle_state(lockstep::pickle_state(lockstep::state_dict(optimizer)), "a");
  };
  // The faults of another optimizer's states would be noise.
  CHECK(text_of<lockstep::CheckpointError>(
            [&] { lockstep::load_state_dict(adam, lockstep::state_dict(sgd)); }) ==
        "the state dict does not fit the optimizer: the options of group 0: missing \"betas\", \"eps\"; "
        "unexpected \"momentum\", \"dampening\", \"nesterov\"; load it into an optimizer of the same "
        "type, over the same parameters and groups");
  lockstep::AdamW adamw(model->parameters());
  refused(adamw, lockstep::state_dict(adam), {"group 0 is of Adam;"});
  refused(adam, 3, {"no state dict of an optimizer"});
  lockstep::SGD fewer({model->hidden->weight});
  refused(fewer, lockstep::state_dict(sgd), {"group 0 has 6 parameters, the optimizer's 1"});

  auto dict = saved(adam);
  auto states = dict.toGenericDict().at("state").toGenericDict();
  states.at(std::int64_t{0}).toGenericDict().insert_or_assign("exp_avg", torch::ones({3}));
  (void)states.at(std::int64_t{1}).toGenericDict().erase("exp_avg_sq");
  states.at(std::int64_t{2}).toGenericDict().insert("more", torch::ones({3}));
  states.at(std::int64_t{3}).toGenericDict().insert_or_assign("step", -1.0);
  states.insert(std::int64_t{9}, states.at(std::int64_t{4}));
  dict.toGenericDict().at("param_groups").toList().get(0).toGenericDict().insert_or_assign("lr", -1.0);
  const auto before = lockstep::pickle_state(lockstep::state_dict(adam));
  refused(adam, dict,
          {"lr = -1", "exp_avg of state 0 is [3] float32, the parameter [8, 6] float32",
           "state 1: missing \"exp_avg_sq\"", "state 2: unexpected \"more\"", "step of state 3 is no count",
           "state 9 is of no parameter"});
  CHECK(lockstep::pickle_state(lockstep::state_dict(adam)) == before);

  torch::optim::Adagrad other(model->parameters());
  CHECK_THROWS_AS(lockstep::state_dict(other), lockstep::UsageError);
}

TEST_CASE("a trained parameter without a state among others that have one is warned of by its name") {
  const TemporaryFolder folder;
  const auto world = lockstep::World::from_environment();
  lockstep::Trainer trainer{world,
                            {.batch_size = 8, .progress = false},
                            TinyNet(),
                            lockstep::LocalComm(world),
                            lockstep::MakeOptimizer{[](std::vector<at::Tensor> parameters) {
                              return lockstep::Adam(std::move(parameters), {.lr = 0.1});
                            }}};
  trainer.fit(three_classes(40), cross_entropy_of);
  lockstep::save_state_dict(trainer, folder / "run.pt");
  const auto load = [&](const c10::IValue& file) {
    lockstep::torch_save(file, folder / "other.pt");
    return written(2, [&] { lockstep::load_state_dict(trainer, folder / "other.pt"); });
  };
  auto file = lockstep::torch_load(folder / "run.pt");
  const auto optimizer = file.toGenericDict().at("optimizer");
  auto states = optimizer.toGenericDict().at("state").toGenericDict();
  const std::string names =
      fmt::format("\"{}\", \"{}\"", lockstep::unique_parameters(*trainer.model())[1].name,
                  lockstep::unique_parameters(*trainer.model())[3].name);
  CHECK(load(file).empty());
  (void)states.erase(std::int64_t{1});
  (void)states.erase(std::int64_t{3});
  says(load(file), {"other.pt: the optimizer's state dict has no state of " + names});
  says(written(2, [&] { lockstep::load_state_dict(trainer.optimizer(), optimizer); }),
       {"has no state of \"parameter 1, [8] float32\", \"parameter 3, "});
  // A frozen parameter, and an optimizer that has made no step, need none.
  lockstep::unique_parameters(*trainer.model())[1].tensor.requires_grad_(false);
  lockstep::unique_parameters(*trainer.model())[3].tensor.requires_grad_(false);
  CHECK(load(file).empty());
  lockstep::unique_parameters(*trainer.model())[1].tensor.requires_grad_(true);
  states.clear();
  CHECK(load(file).empty());
}

TEST_CASE("a trainer's file of state dicts holds the run, and one without a part is refused") {
  const TemporaryFolder folder;
  const auto world = lockstep::World::from_environment();
  const lockstep::MakeOptimizer make{[](std::vector<at::Tensor> parameters) {
    return lockstep::SGD(std::move(parameters), {.lr = 0.1, .momentum = 0.9});
  }};
  const auto trainer_of = [&](double init_scale) {
    return lockstep::Trainer{world,
                             {.epochs = 2, .batch_size = 8, .progress = false},
                             TinyNet(),
                             lockstep::LocalComm(world),
                             lockstep::Fp16({.init_scale = init_scale}),
                             make};
  };
  const auto parts = [](auto& trainer) {
    return lockstep::pickle_state(lockstep::dict_of(lockstep::state_dict(trainer.model()))) +
           lockstep::pickle_state(lockstep::state_dict(trainer.optimizer())) +
           lockstep::pickle_state(lockstep::state_dict(trainer.precision().scaler())) +
           std::to_string(trainer.epoch()) + " " + std::to_string(trainer.step());
  };
  auto saved = trainer_of(128), loaded = trainer_of(64);
  saved.fit(three_classes(40), cross_entropy_of, lockstep::OnStep{[&](const auto&) {
              CHECK_THROWS_AS(lockstep::load_state_dict(saved, folder / "run.pt"), lockstep::UsageError);
            }});
  lockstep::save_state_dict(saved, folder / "run.pt");
  CHECK(parts(saved) != parts(loaded));
  lockstep::load_state_dict(loaded, folder / "run.pt");
  CHECK(parts(saved) == parts(loaded));
  CHECK(loaded.epoch() == 2);
  CHECK(loaded.step() == 10);

  const auto file = lockstep::torch_load(folder / "run.pt").toGenericDict();
  const auto other = folder / "other.pt";
  const auto refused = [&](const char* key, const c10::IValue& value, const char* words) {
    auto changed = file.copy();
    if (value.isNone())
      static_cast<void>(changed.erase(key));
    else
      changed.insert_or_assign(key, value);
    lockstep::torch_save(c10::IValue(changed), other);
    auto trainer = trainer_of(32);
    refuses([&] { lockstep::load_state_dict(trainer, other); }, {words});
    CHECK(trainer.step() == 0);
  };
  refused("optimizer", {}, "other.pt has no entry \"optimizer\": save {\"model\": ");
  for (const c10::IValue& step : {c10::IValue(1.5), c10::IValue(-1), c10::IValue(std::int64_t{1} << 62)})
    refused("step", step, "an entry \"step\" that is no count");
  refused("model", file.at("scaler"), "no tensors: ");
  refused("scaler", file.at("model"), "GradScaler has no float \"scale\"");
  auto both = file.copy();
  both.insert_or_assign("model", lockstep::dict_of(lockstep::StateDict()));
  auto no_groups = file.at("optimizer").toGenericDict().copy();
  no_groups.insert_or_assign("param_groups", c10::impl::GenericList(c10::AnyType::get()));
  both.insert_or_assign("optimizer", no_groups);
  for (const auto& [value, words] : std::vector<std::pair<c10::IValue, std::vector<std::string>>>{
           {both, {"missing \"hidden.weight\"", "it has 0 parameter groups, the optimizer 1"}},
           {file.at("model"), {"has no entry \"model\" and \"optimizer\": save"}},
           {"text", {"other.pt holds no dict"}}}) {
    lockstep::torch_save(value, other);
    refuses([&] { lockstep::load_state_dict(loaded, other); }, words);
  }
}

TEST_CASE("torch_save writes values of each kind, and names what it cannot write") {
  c10::Dict<std::string, std::int64_t> inner;
  inner.insert("epoch", 3);
  c10::impl::GenericDict dict(c10::StringType::get(), c10::AnyType::get());
  const auto transposed = torch::arange(6.0).view({2, 3}).t();
  dict.insert("tensor", transposed);
  dict.insert("conjugated", torch::ones({2}, at::kComplexFloat).conj());
  dict.insert("numbers", std::vector<std::int64_t>{1, -1, std::int64_t{1} << 40, -(std::int64_t{1} << 40)});
  dict.insert("reals", std::vector<double>{0.1, -1e300});
  dict.insert("inner", inner);
  dict.insert("none", c10::IValue());
  dict.insert("flag", true);
  const auto read = lockstep::unpickle_state(lockstep::pickle_state(dict), "a").toGenericDict();
  CHECK(torch::equal(read.at("tensor").toTensor(), transposed));
  CHECK(read.at("tensor").toTensor().strides() == transposed.strides());
  CHECK(read.at("numbers").toListRef()[3].toInt() == -(std::int64_t{1} << 40));
  CHECK(read.at("reals").toListRef()[1].toDouble() == -1e300);
  CHECK(read.at("inner").toGenericDict().at("epoch").toInt() == 3);
  CHECK(read.at("none").isNone());
  CHECK(read.at("flag").toBool());

  const auto refused = [&](const c10::IValue& value, const char* words) {
    dict.insert_or_assign("bad", value);
    refuses<lockstep::UsageError>([&] { lockstep::pickle_state(dict); }, {words});
  };
  refused(torch::eye(2).to_sparse(), "the value of ['bad'] is a tensor that is sparse");
  refused(c10::complex<double>(1, 2), "of type ComplexDouble");
  auto cycle = dict.copy();
  cycle.insert_or_assign("bad", dict);
  refused(cycle, "nested more than 64 deep");
  cycle.clear();
}

TEST_CASE("an entry that nobody asks for is read or skipped, and one that is refused is named") {
  const auto text = [](const std::string& word) {
    return "X" + std::string(1, static_cast<char>(word.size())) + std::string(3, '\0') + word;
  };
  const auto file = [&](const std::string& value) {
    return file_of(std::string("\x80\x02", 2) + "}(" + text("epoch") + "K\x07" + text("lr_scheduler") + "}(" +
                   text("last") + "K\x01" + text("milestones") + value + "uu.");
  };
  const auto read = [&](const std::string& value) {
    const auto dict = lockstep::unpickle_state(file(value), "a.pt").toGenericDict();
    CHECK(dict.at("epoch").toInt() == 7);
    return dict.at("lr_scheduler").toGenericDict().at("milestones");
  };
  CHECK(read("\x8a\x01\x80").toInt() == -128);
  CHECK(read("ccollections\nCounter\n}K\x1eK\x01s\x85R").toGenericDict().at(std::int64_t{30}).toInt() == 1);
  for (const char* skipped :
       {"c__builtin__\nset\n]K\x01"
        "a\x85R",
        "ctorch\nfloat32\n", "ctorch\nSize\nK\x01\x85\x85R", "c__builtin__\ncomplex\nK\x01K\x02\x86R",
        "ctorch.cuda\nFloatTensor\n", "ctorch.cuda.sparse\nFloatTensor\n", "ctorch\nFloatStorage\n",
        "ccollections\nOrderedDict\n", "ctorch\nFloatStorage\n\x85", "\x8f"}) {
    INFO(skipped);
    CHECK(read(skipped).isNone());
  }
  CHECK(read("ccollections\nOrderedDict\n)R}U\x04noteK\x01sb").toGenericDict().empty());  // an attribute
  CHECK(read("U\x02hi").toStringRef() == "hi");
  const std::string at_key = "in ['lr_scheduler']['milestones']: ";
  for (const auto& refused : std::vector<std::pair<std::string, std::string>>{
           {")" + std::string(70, '\x85'), "its values are nested more than 64"},
           {")" + std::string(63, '\x85'), "its values are nested more than 64"},
           {"cargparse\nNamespace\n)\x81}b", "it holds an object of 'argparse.Namespace'"}})
    refuses([&] { lockstep::unpickle_state(file(refused.first), "a.pt"); }, {at_key + refused.second});
  // A list that is there twice.
  const auto twice = lockstep::unpickle_state(file_of(std::string("\x80\x02", 2) + "}(" + text("a") +
                                                      "]q\x01K\x05"
                                                      "a" +
                                                      text("b") + "h\x01u."),
                                              "a.pt");
  CHECK(twice.toGenericDict().at("b").toListRef()[0].toInt() == 5);
}

TEST_CASE("a state dict from before num_batches_tracked loads, and keeps the model's own") {
  TinyNet saved, model;
  model->norm->num_batches_tracked.fill_(3);
  auto entries = lockstep::state_dict(saved);
  std::erase_if(entries, [](const auto& entry) { return entry.name == "norm.num_batches_tracked"; });
  const auto keys = lockstep::load_state_dict(model, entries);
  CHECK(keys.missing_keys.empty());
  CHECK(model->norm->num_batches_tracked.item<std::int64_t>() == 3);
  CHECK(torch::equal(model->last->weight, saved->last->weight));
  // Other modules of the file have one: this one's is missing.
  entries.push_back({"other.num_batches_tracked", torch::zeros({}, torch::kLong)});
  CHECK(lockstep::load_state_dict(model, entries, {.strict = false}).missing_keys ==
        std::vector<std::string>{"norm.num_batches_tracked"});
}

TEST_CASE("torch_load refuses what is no state dict, and executes nothing") {
  using namespace std::string_literals;
  const std::string one = "K\x01\x85", two = "K\x02\x85", zero = "K\0"s, minus = "J\xFF\xFF\xFF\xFF";
  for (const auto& refused : std::vector<std::pair<std::string, std::string>>{
           {"cos\nsystem\nX\x04\0\0\0true\x85R."s, "an object of 'os.system'"},
           {"cargparse\nNamespace\n)\x81.", "'argparse.Namespace'"},
           {"ctorch\nFloatStorage\n.", "is no value"},
           {"]q\0h\0a."s, "contains itself"},
           {"]q\0]h\0aa."s, "contains itself"},
           {")" + std::string(100'000, '\x85') + ".", "nested more than 64"},
           {"}(K\x01NK\x01Nu.", "the key 1 twice"},
           {"X\xFF\xFF\xFF\xFFz.", "cut short"},
           {"}", "cut short"},
           {".", "does not end with one value"},
           {"0.", "the opcode 48"},
           {"R.", "where there is none"},
           {"}K\x01Nb.", "sets items of what is no dict"},
           {tensor_pickle("K\x01", two, one), "does not fit its storage"},
           {tensor_pickle(zero, two, two), "does not fit its storage"},
           {tensor_pickle("K\x03", zero + "\x85", one), "does not fit its storage"},
           {tensor_pickle(minus, two, one), "no offset"},
           {tensor_pickle(zero, two, minus + "\x85"), "no number from 0"},
           {tensor_pickle(zero, two, "\x8a\x08\xFF\xFF\xFF\xFF\xFF\xFF\xFF\x7F\x85"),
            "does not fit its storage"},
           {tensor_pickle(zero, two, one, "K\x03"), "are not 3 elements"},
           {tensor_pickle(zero, two, one, "K\x02", "1"), "'data/1' is missing"},
           {tensor_pickle(zero, two, one, "K\x02", "../0"), "no name of a record"},
           {tensor_pickle(zero, two, one, "K\x01", "0", "DoubleStorage"), "does not fit its storage"},
           {tensor_pickle(zero, two, one, "K\x02", "0", "QInt8Storage"), "a tensor has no storage"}})
    refuses([&] { read(refused.first); }, {refused.second});
  CHECK_NOTHROW(read("}G"s + std::string(8, '\0') + "Ns."));  // {0.0: None}, which no state dict needs
  CHECK_NOTHROW(read(tensor_pickle(zero, two, one)));
  CHECK_NOTHROW(read(tensor_pickle(zero, ")", ")")));

  const TemporaryFolder folder;
  TinyNet model;
  lockstep::save_model(*model, folder / "model.pt");
  refuses([&] { lockstep::torch_load(folder / "model.pt"); }, {"load it with load_model"});
  refuses(
      [&] {
        lockstep::torch_load(folder.write("old.pt",
                                          "\x80\x02\x8a\x0al\xfc\x9c"
                                          "F"));
      },
      {"before PyTorch 1.6"});
  CHECK_THROWS_AS(lockstep::torch_load(folder / "none.pt"), lockstep::CheckpointError);
}

TEST_CASE("a file of torch_save with any byte changed, or cut anywhere, is refused or equal") {
  TinyNet model;
  lockstep::Adam adam(std::vector<at::Tensor>{model->last->bias});
  step(model, adam);
  const std::string good = lockstep::pickle_state(lockstep::state_dict(adam));
  for (std::size_t length = 0; length < good.size(); length += length % 64 == 63 ? 1 : 7)
    CHECK_THROWS_AS(lockstep::unpickle_state(good.substr(0, length), "a"), lockstep::CheckpointError);
  for (std::size_t at = 0; at < good.size(); ++at) {
    std::string changed = good;
    changed[at] = static_cast<char>(changed[at] ^ 0x5A);
    try {
      if (lockstep::pickle_state(lockstep::unpickle_state(changed, "a")) != good) FAIL_CHECK("byte " << at);
    } catch (const lockstep::CheckpointError&) {
    }
  }
  // The pickle alone, with a correct checksum around it.
  std::istringstream file(good);
  const auto [data, size] = caffe2::serialize::PyTorchStreamReader(&file).getRecord("data.pkl");
  const std::string pickle(static_cast<const char*>(data.get()), size);
  std::size_t read = 0;
  for (std::size_t at = 2; at < pickle.size(); ++at)
    for (const int value : {0, 0x28, 0x2E, 0x52, 0x75, 0x7D, 0xFF, pickle[at] ^ 1}) {
      std::string changed = pickle;
      changed[at] = static_cast<char>(value);
      try {
        lockstep::unpickle_state(file_of(changed, std::string(12, '\1')), "a");
        ++read;
      } catch (const lockstep::CheckpointError&) {
      }
    }
  CHECK(read < 8 * pickle.size());
}

}  // namespace state_dict_test

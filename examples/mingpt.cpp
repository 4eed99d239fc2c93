// A character-level GPT, trained with several processes: PyTorch's minGPT-ddp example, with its settings in a
// TOML file and overrides of single keys on the command line, as Hydra has them:
//   mingpt --nproc 2                                          a small model on a text that the program makes
//   mingpt --nproc 2 --config mingpt.toml --data-path input.txt trainer_config.snapshot_path=shakespeare.pt
// or torchrun --no-python mingpt ..., srun mingpt ..., mpirun mingpt ...
//
// What differs from the original:
// - Its attention is not causal: its mask of 0 and 1 is added to the scores, so that each position sees its
//   own target. Here the mask is causal.
// - It projects attention's result twice in a row; here once, as GPT-2 does.
// - It splits overlapping windows at random, so that every window of the test part also occurs, shifted, in
//   the training part. Here the test part is the end of the text.
// - It clips gradients that are still scaled, and its snapshot holds no scaler. Here Trainer unscales first,
//   and its checkpoint holds the scaler.
// - Rank 0 saves, not the first rank of each host.
// - A character is a byte; a letter beyond ASCII counts as several.
// New: SIGTERM and SIGUSR1, the signals of batch systems, save the snapshot after a step of all ranks and end
// the run with exit code 75; trainer_config.report_dir=FOLDER gets a page of the run and its curves.
#include <torch/torch.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <optional>
#include <random>
#include <sstream>
#include <string>
#include <string_view>
#include <system_error>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include <fmt/format.h>
#include <toml++/toml.h>

#include "lockstep/cli.hpp"
#include "lockstep/interchange/state_dict.hpp"
#include "lockstep/lockstep.hpp"
#include "lockstep/report/metrics_files.hpp"
#include "lockstep/report/run_report.hpp"
#include "lockstep/report/tensorboard.hpp"

namespace nn = torch::nn;

struct Options {
  struct {
    std::int64_t n_layer = 2, n_head = 4, n_embd = 64;
    double embd_pdrop = 0.1, resid_pdrop = 0.1, attn_pdrop = 0.1;
  } gpt;
  struct {
    std::string path;
    std::int64_t block_size = 32;
    double train_split = 0.9, truncate = 1;
  } data;
  struct {
    std::int64_t max_epochs = 3, batch_size = 32, data_loader_workers = 0, save_every = 3, log_every = 100,
                 seed = 3407;
    double grad_norm_clip = 1;
    std::string snapshot_path = "gpt_snapshot.pt", amp_dtype = "float16", loss_path, report_dir;
    bool use_amp = false;
  } trainer;
  struct {
    double weight_decay = 0.1, learning_rate = 3e-3;
  } optimizer;
  struct {
    std::int64_t number = 2, length = 200;
    double temperature = 0.8;
  } sample;
};

// ---- The model -----------------------------------------------------------------------------------------

// lockstep::Linear has the bits of Python's nn.Linear for inputs [N, T, C]; torch::nn::Linear does not.
struct CausalSelfAttentionImpl : nn::Module {
  explicit CausalSelfAttentionImpl(const Options& options)
      : heads(options.gpt.n_head), pdrop(options.gpt.attn_pdrop) {
    const std::int64_t width = options.gpt.n_embd;
    c_attn = register_module("c_attn", lockstep::Linear(width, 3 * width));
    c_proj = register_module("c_proj", lockstep::Linear(width, width));
    resid_drop = register_module("resid_drop", nn::Dropout(options.gpt.resid_pdrop));
  }
  torch::Tensor forward(const torch::Tensor& x) {  // [N, T, C]
    const auto qkv = c_attn(x).view({x.size(0), x.size(1), 3, heads, -1}).permute({2, 0, 3, 1, 4});
    const auto y = torch::scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], /*attn_mask=*/{},
                                                       is_training() ? pdrop : 0, /*is_causal=*/true);
    return resid_drop(c_proj(y.transpose(1, 2).flatten(2)));
  }

  std::int64_t heads;
  double pdrop;
  lockstep::Linear c_attn{nullptr}, c_proj{nullptr};
  nn::Dropout resid_drop{nullptr};
};
TORCH_MODULE(CausalSelfAttention);

struct BlockImpl : nn::Module {
  explicit BlockImpl(const Options& options) {
    const std::int64_t width = options.gpt.n_embd;
    ln1 = register_module("ln1", nn::LayerNorm(nn::LayerNormOptions({width})));
    attn = register_module("attn", CausalSelfAttention(options));
    ln2 = register_module("ln2", nn::LayerNorm(nn::LayerNormOptions({width})));
    c_fc = register_module("c_fc", lockstep::Linear(width, 4 * width));
    c_proj = register_module("c_proj", lockstep::Linear(4 * width, width));
    resid_drop = register_module("resid_drop", nn::Dropout(options.gpt.resid_pdrop));
  }
  torch::Tensor forward(torch::Tensor x) {
    x = x + attn(ln1(x));
    return x + resid_drop(c_proj(torch::gelu(c_fc(ln2(x)))));
  }

  nn::LayerNorm ln1{nullptr}, ln2{nullptr};
  CausalSelfAttention attn{nullptr};
  lockstep::Linear c_fc{nullptr}, c_proj{nullptr};
  nn::Dropout resid_drop{nullptr};
};
TORCH_MODULE(Block);

struct GptImpl : nn::Module {
  GptImpl(const Options& options, std::int64_t vocab_size) {
    const std::int64_t width = options.gpt.n_embd;
    tok_emb = register_module("tok_emb", nn::Embedding(vocab_size, width));
    pos_emb = register_parameter("pos_emb", torch::zeros({1, options.data.block_size, width}));
    drop = register_module("drop", nn::Dropout(options.gpt.embd_pdrop));
    blocks = register_module("blocks", nn::Sequential());
    for (std::int64_t i = 0; i < options.gpt.n_layer; ++i) blocks->push_back(Block(options));
    ln_f = register_module("ln_f", nn::LayerNorm(nn::LayerNormOptions({width})));
    head = register_module("head", lockstep::Linear(nn::LinearOptions(width, vocab_size).bias(false)));

    const torch::NoGradGuard no_grad;
    for (const auto& module : modules(/*include_self=*/false)) {
      if (auto* linear = module->as<nn::Linear>()) {
        linear->weight.normal_(0, 0.02);
        if (linear->bias.defined()) linear->bias.zero_();
      } else if (auto* embedding = module->as<nn::Embedding>()) {
        embedding->weight.normal_(0, 0.02);
      }
    }
    // The residual stream adds up two projections a layer.
    for (auto& parameter : named_parameters())
      if (parameter.key().ends_with("c_proj.weight"))
        parameter.value().normal_(0, 0.02 / std::sqrt(2.0 * static_cast<double>(options.gpt.n_layer)));
  }
  torch::Tensor forward(const torch::Tensor& ids) {  // [N, T], T <= block_size
    // In the order of the Python program: the operands of + have no order in C++, and backward follows it.
    const auto tokens = tok_emb(ids);
    const auto positions = pos_emb.narrow(1, 0, ids.size(1));
    return head(ln_f(blocks->forward(drop(tokens + positions))));
  }

  nn::Embedding tok_emb{nullptr};
  torch::Tensor pos_emb;
  nn::Dropout drop{nullptr};
  nn::Sequential blocks{nullptr};
  nn::LayerNorm ln_f{nullptr};
  lockstep::Linear head{nullptr};
};
TORCH_MODULE(Gpt);

// AdamW decays the weights of linear layers only, not biases, norms and embeddings.
lockstep::AdamW make_optimizer(const Options& options, const Gpt& model) {
  std::vector<torch::Tensor> decayed, others;
  for (const auto& module : model->modules())
    for (const auto& parameter : module->named_parameters(/*recurse=*/false))
      (module->as<nn::Linear>() && parameter.key() == "weight" ? decayed : others)
          .push_back(parameter.value());
  lockstep::AdamWOptions adamw{.lr = options.optimizer.learning_rate,
                               .betas = {0.9, 0.95},
                               .weight_decay = options.optimizer.weight_decay};
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.push_back(lockstep::parameter_group(decayed, adamw));
  adamw.weight_decay = 0;
  groups.push_back(lockstep::parameter_group(others, adamw));
  return lockstep::AdamW(std::move(groups));
}

// ---- The text ------------------------------------------------------------------------------------------

// Sentences that follow a pattern, for runs without a file.
std::string make_text() {
  const auto words = std::to_array<std::vector<std::string>>(
      {{"The king", "A fool", "The queen", "My lord", "A knight", "The ghost", "No man"},
       {"loves", "fears", "follows", "mocks", "remembers", "forgives"},
       {"the crown", "a shadow", "his brother", "the moon", "an honest word", "her daughter"},
       {"at night", "by the sea", "in the hall", "with a sword", "without a cause", "for ever"}});
  std::mt19937 draw(1);
  std::string text;
  while (text.size() < 10'000)
    for (const auto& choice : words)
      text += choice[draw() % choice.size()] + (&choice == &words.back() ? ".\n" : " ");
  return text;
}

// The text as numbers of its characters. A character is a byte.
class Text {
 public:
  explicit Text(const std::string& text) : chars_(text) {
    std::sort(chars_.begin(), chars_.end());
    chars_.erase(std::unique(chars_.begin(), chars_.end()), chars_.end());
    ids_ = torch::empty({static_cast<std::int64_t>(text.size())}, torch::kLong);
    std::transform(text.begin(), text.end(), ids_.data_ptr<std::int64_t>(),
                   [&](char c) { return static_cast<std::int64_t>(chars_.find(c)); });
  }

  // The windows of characters `first` to `last`: sample i is the `block` characters from i, its target the
  // same shifted by one. Both are views of the text.
  [[nodiscard]] lockstep::TensorDataset windows(std::int64_t first, std::int64_t last,
                                                std::int64_t block) const {
    return {ids_.slice(0, first, last - 1).unfold(0, block, 1),
            ids_.slice(0, first + 1, last).unfold(0, block, 1)};
  }
  [[nodiscard]] std::string decode(const torch::Tensor& ids) const {
    std::string text;
    for (std::int64_t i = 0; i < ids.numel(); ++i)
      text += chars_[static_cast<std::size_t>(ids[i].item<std::int64_t>())];
    return text;
  }
  [[nodiscard]] std::int64_t size() const { return ids_.size(0); }
  [[nodiscard]] std::int64_t vocab_size() const { return static_cast<std::int64_t>(chars_.size()); }
  [[nodiscard]] torch::Tensor first() const { return ids_.slice(0, 0, 1); }
  // The FNV-1a hash of the characters before `last`.
  [[nodiscard]] std::uint64_t hash(std::int64_t last) const {
    std::uint64_t hash = 0xcbf29ce484222325;
    const auto* ids = ids_.const_data_ptr<std::int64_t>();
    for (std::int64_t i = 0; i < last; ++i)
      hash = (hash ^ static_cast<unsigned char>(chars_[static_cast<std::size_t>(ids[i])])) * 0x100000001b3;
    return hash;
  }

 private:
  std::string chars_;
  torch::Tensor ids_;
};

Text read_text(const Options& options) {
  std::string text;
  if (const auto& path = options.data.path; path.empty()) {
    text = make_text();
  } else {
    std::ostringstream content;
    content << std::ifstream(path, std::ios::binary).rdbuf();  // fails for a folder, too
    text = content.str();
    if (!content || text.empty())
      throw lockstep::UsageError(
          fmt::format("--data-path, data_config.path: '{}' holds no text that can be read", path));
  }
  text.resize(static_cast<std::size_t>(static_cast<double>(text.size()) * options.data.truncate));
  return Text(text);
}

// ---- Training ------------------------------------------------------------------------------------------

// Continues the text's first character, `number` times at once.
torch::Tensor generate(Gpt& gpt, const Options& options, const torch::Tensor& first) {
  const lockstep::EvaluationMode evaluation(*gpt);
  auto ids = first.to(gpt->pos_emb.device()).repeat({options.sample.number, 1});
  for (std::int64_t i = 0; i < options.sample.length; ++i) {
    const auto window = ids.slice(1, std::max<std::int64_t>(0, ids.size(1) - options.data.block_size));
    const auto logits = gpt(window).select(1, -1).to(torch::kFloat) / options.sample.temperature;
    ids = torch::cat({ids, torch::multinomial(torch::softmax(logits, -1), 1)}, 1);
  }
  return ids.cpu();
}

// The part of a snapshot that ties it to the text that its run trains on.
struct TextOfSnapshot {
  std::uint64_t hash;
  void save(torch::serialize::OutputArchive& archive) const {
    archive.write("hash", c10::IValue(static_cast<std::int64_t>(hash)));
  }
  void load(torch::serialize::InputArchive& archive) const {
    c10::IValue saved;
    archive.read("hash", saved);
    if (static_cast<std::uint64_t>(saved.toInt()) != hash)
      throw lockstep::CheckpointError("it is of a run on another text, or on another part of it");
  }
};

// What rank 0 writes about the run into a folder: a page, TensorBoard's events and a table.
template <class Comm>
struct Reports {
  Reports(const lockstep::World& world, Comm& comm, const std::filesystem::path& folder)
      : page(comm, folder / "report.html", {.title = "mingpt"}),
        board(world, folder),
        csv(world, folder / "metrics.csv") {}
  void each(auto&& f) { f(page), f(board), f(csv); }

  lockstep::RunReport<Comm> page;
  lockstep::TensorBoard board;
  lockstep::CsvLog csv;
};

template <class Precision, class Comm>
void train(const lockstep::World& world, const Options& options, const Text& text, Comm comm) {
  const auto& config = options.trainer;
  const std::int64_t block = options.data.block_size;
  const auto split = static_cast<std::int64_t>(static_cast<double>(text.size()) * options.data.train_split);
  if (split <= block)
    throw lockstep::UsageError(fmt::format(
        "{} characters to train on hold no block of {} with its next: give more, or a smaller block_size",
        split, block));
  world.log.info("Data has {} characters, {} unique.", text.size(), text.vocab_size());
  auto training_part = text.windows(0, split, block);

  torch::manual_seed(static_cast<std::uint64_t>(config.seed));
  Gpt model(options, text.vocab_size());
  std::int64_t parameters = 0;  // of the blocks, as the original counts
  for (const auto& parameter : model->blocks->parameters()) parameters += parameter.numel();
  world.log.info("number of parameters: {:.2f}M", static_cast<double>(parameters) / 1e6);

  lockstep::Trainer trainer{world,
                            lockstep::TrainerOptions{.epochs = config.max_epochs,
                                                     .batch_size = config.batch_size,
                                                     .seed = static_cast<std::uint64_t>(config.seed),
                                                     .num_workers = config.data_loader_workers,
                                                     .progress = false},
                            model,
                            std::move(comm),
                            Precision(),
                            lockstep::MakeOptimizer{[&](const std::vector<torch::Tensor>&) {
                              return make_optimizer(options, model);
                            }}};
  TextOfSnapshot text_of_snapshot{text.hash(split)};
  const auto save_snapshot = [&] { trainer.save_checkpoint(config.snapshot_path, text_of_snapshot); };
  bool resumes = false;
  try {
    resumes = trainer.load_checkpoint_if_exists(config.snapshot_path, text_of_snapshot);
  } catch (const lockstep::CheckpointError& error) {  // the user's file, not a failure of the run
    std::string why = error.what();
    // Of another model, the first of the tensors that differ tells enough.
    if (why.find("does not fit the model") != std::string::npos)
      if (const auto more = std::count(why.begin(), why.end(), ';'); more > 0)
        why = why.substr(0, why.find(';')) + fmt::format(", and {} more", more);
    throw lockstep::UsageError(fmt::format(
        "trainer_config.snapshot_path: {}; remove it, or set trainer_config.snapshot_path to another file",
        why));
  }
  if (resumes) {
    world.log.info("Resuming training from snapshot at Epoch {}", trainer.epoch() + 1);
    const auto groups = lockstep::state_dict(trainer.optimizer()).toGenericDict().at("param_groups");
    const auto decayed = groups.toList().get(0).toGenericDict();
    const double lr = decayed.at("lr").toDouble(), weight_decay = decayed.at("weight_decay").toDouble();
    if (const auto& given = options.optimizer;
        lr != given.learning_rate || weight_decay != given.weight_decay)
      world.log.warning(
          "optimizer_config.learning_rate={} and weight_decay={} have no effect: the snapshot has {} and {}",
          given.learning_rate, given.weight_decay, lr, weight_decay);
  } else {
    world.log.info("Snapshot not found. Training model from scratch");
  }

  const auto loss = [](Gpt& gpt, const auto& batch) {
    return nn::functional::cross_entropy(gpt(batch.data).flatten(0, 1), batch.target.flatten());
  };
  std::int64_t tokens = 0;  // that this rank has trained on since the epoch started or was resumed
  const auto training_loss = [&](Gpt& gpt, const auto& batch) {
    tokens += batch.data.numel();
    return loss(gpt, batch);
  };
  std::optional<Reports<Comm>> reports;
  if (!config.report_dir.empty()) reports.emplace(world, trainer.comm(), config.report_dir);
  const auto on_profile = [&](const lockstep::StepReport& step, const lockstep::StepProfile& profile) {
    if (reports) reports->each([&](auto& report) { report.on_profile(step, profile); });
  };
  std::ofstream losses;
  if (world.rank() == 0 && !config.loss_path.empty()) losses.open(config.loss_path);
  const auto on_step = [&](const lockstep::StepReport& step) {
    if (losses.is_open()) losses << fmt::format("{:.9g}\n", step.loss());
    if (step.step_in_epoch % config.log_every == 0)  // on all ranks, each with its own loss
      std::cout << fmt::format("[RANK{}] Epoch {} | Iter {} | Train Loss {:.5f}\n", world.rank(),
                               step.epoch + 1, step.step_in_epoch, step.loss())
                << std::flush;
  };
  const auto on_epoch = [&](const lockstep::EpochReport& report) {
    const std::int64_t epoch = report.epoch + 1;
    world.log.info("Epoch {} | Train Loss {:.5f} | {:.0f} tokens/s", epoch, report.loss,
                   static_cast<double>(world.size() * std::exchange(tokens, 0)) / report.seconds);
    if (reports) reports->each([&](auto& each) { each.on_epoch(report); });
    if (text.size() - split > block) {
      const double eval_loss = trainer.evaluate(text.windows(split, text.size(), block), loss);
      world.log.info("Epoch {} | Eval Loss {:.5f}", epoch, eval_loss);
      const std::int64_t last = report.step - 1;  // a resumed run begins at report.step
      if (reports) reports->each([&](auto& each) { each.add_scalar("eval/loss", eval_loss, last); });
    }
    // Last: an evaluation draws from the generator of dropout, whose state the snapshot holds.
    if (epoch % config.save_every == 0) {
      save_snapshot();  // with the next epoch to run and the scaler
      world.log.info("Snapshot saved at epoch {}", epoch);
    }
  };
  {
    lockstep::StopOnSignal stop{trainer.comm(), save_snapshot};
    trainer.fit(training_part, training_loss, lockstep::GradientClip{config.grad_norm_clip},
                lockstep::OnProfile{on_profile}, lockstep::OnStep{on_step}, lockstep::OnEpoch{on_epoch},
                stop);
  }

  world.rank_zero([&] {
    if (options.sample.number == 0) return;
    torch::manual_seed(static_cast<std::uint64_t>(config.seed));
    const auto samples =
        trainer.precision().forward([&] { return generate(trainer.model(), options, text.first()); });
    for (std::int64_t i = 0; i < samples.size(0); ++i)
      world.log.info("\n--- sample {} ---\n{}", i + 1, text.decode(samples[i]));
  });
}

// ---- The configuration ---------------------------------------------------------------------------------

struct Key {
  std::string name;
  std::variant<std::int64_t*, double*, bool*, std::string*> target;
  double least, most;  // of a number
  std::string help;
};

std::vector<Key> keys_of(Options& o) {
  constexpr double many = 1e9;
  return {
      {"gpt_config.n_layer", &o.gpt.n_layer, 1, many, "transformer blocks"},
      {"gpt_config.n_head", &o.gpt.n_head, 1, many, "attention heads; a divisor of n_embd"},
      {"gpt_config.n_embd", &o.gpt.n_embd, 1, many, "width"},
      {"gpt_config.embd_pdrop", &o.gpt.embd_pdrop, 0, 1, "dropout of the embeddings"},
      {"gpt_config.resid_pdrop", &o.gpt.resid_pdrop, 0, 1, "dropout of the residual branches"},
      {"gpt_config.attn_pdrop", &o.gpt.attn_pdrop, 0, 1, "dropout of the attention"},
      {"data_config.path", &o.data.path, 0, 0, "file of text; '': a text that the program makes"},
      {"data_config.block_size", &o.data.block_size, 1, many, "context length in characters"},
      {"data_config.train_split", &o.data.train_split, 0, 1, "fraction to train on, from the start"},
      {"data_config.truncate", &o.data.truncate, 0, 1, "fraction of the text to use"},
      {"trainer_config.max_epochs", &o.trainer.max_epochs, 0, many, "epochs to train"},
      {"trainer_config.batch_size", &o.trainer.batch_size, 1, many, "batch size of each process"},
      {"trainer_config.data_loader_workers", &o.trainer.data_loader_workers, 0, 1024,
       "data-loading threads of each process"},
      {"trainer_config.grad_norm_clip", &o.trainer.grad_norm_clip, 0, many, "maximum norm of the gradients"},
      {"trainer_config.snapshot_path", &o.trainer.snapshot_path, 0, 0, "file of the snapshot"},
      {"trainer_config.save_every", &o.trainer.save_every, 1, many, "epochs between snapshots"},
      {"trainer_config.use_amp", &o.trainer.use_amp, 0, 0, "mixed precision"},
      {"trainer_config.amp_dtype", &o.trainer.amp_dtype, 0, 0, "of use_amp: float16 or bfloat16"},
      {"trainer_config.log_every", &o.trainer.log_every, 1, many, "steps between printed lines"},
      {"trainer_config.loss_path", &o.trainer.loss_path, 0, 0, "file for rank 0's loss of every step"},
      {"trainer_config.report_dir", &o.trainer.report_dir, 0, 0,
       "folder for report.html, events, metrics.csv"},
      {"trainer_config.seed", &o.trainer.seed, 0, 4294967295, "seed of the model, its dropout and the order"},
      {"optimizer_config.weight_decay", &o.optimizer.weight_decay, 0, many,
       "of the linear layers' weights; a snapshot keeps its own"},
      {"optimizer_config.learning_rate", &o.optimizer.learning_rate, 0, many,
       "of AdamW; a snapshot keeps its own"},
      {"sample_config.number", &o.sample.number, 0, 1000, "texts to generate after training"},
      {"sample_config.length", &o.sample.length, 0, 1e6, "characters of each"},
      {"sample_config.temperature", &o.sample.temperature, 1e-3, 1e3, "low: likely characters only"},
  };
}

std::string value_text(const Key& key) {
  return std::visit([](const auto* value) { return fmt::format("{}", *value); }, key.target);
}

// Throws for an unknown key, a value of another type, or one out of range. `where` begins the error.
void set(const std::vector<Key>& keys, const std::string& where, const std::string& name,
         const toml::node& value) {
  const auto key =
      std::find_if(keys.begin(), keys.end(), [&](const Key& known) { return known.name == name; });
  if (key == keys.end()) throw CLI::ValidationError(where, fmt::format("there is no key {}", name));
  std::visit(
      [&]<class T>(T* target) {
        auto given = value.value_exact<T>();
        const char* kind = "a text";
        bool good = true;
        if constexpr (std::is_same_v<T, bool>) {
          kind = "true or false";
        } else if constexpr (std::is_arithmetic_v<T>) {
          kind = std::is_integral_v<T> ? "a whole number" : "a number";
          if (const auto whole = value.value_exact<std::int64_t>()) given = static_cast<T>(*whole);
          good =
              given && static_cast<double>(*given) >= key->least && static_cast<double>(*given) <= key->most;
        }
        if (!given || !good) {
          const bool number = std::is_arithmetic_v<T> && !std::is_same_v<T, bool>;
          throw CLI::ValidationError(
              where, fmt::format("{} takes {}{}", name, kind,
                                 number ? fmt::format(" from {} to {}", key->least, key->most) : ""));
        }
        *target = *given;
      },
      key->target);
}

void read_table(const std::vector<Key>& keys, const std::string& file, const toml::table& table,
                const std::string& prefix = "") {
  for (const auto& [key, node] : table) {
    const std::string name = prefix + std::string(key.str());
    if (const auto* section = node.as_table())
      read_table(keys, file, *section, name + ".");
    else
      set(keys, fmt::format("{}, line {}", file, node.source().begin.line), name, node);
  }
}

// `name=value`. The value is one of TOML, or a text without quotes.
void read_override(const std::vector<Key>& keys, const std::string& argument) {
  const auto equals = argument.find('=');
  if (equals == std::string::npos)
    throw CLI::ValidationError(argument, "write an override as section.key=value");
  const std::string name = argument.substr(0, equals), value = argument.substr(equals + 1);
  if (value.empty())
    throw CLI::ValidationError(argument,
                               fmt::format("the value is empty; an empty text is \"{}''\"", argument));
  toml::table parsed;
  try {
    parsed = toml::parse("value = " + value);
  } catch (const toml::parse_error&) {
    parsed.insert("value", value);
  }
  set(keys, argument, name, *parsed.get("value"));
}

void check_together(const Options& options) {
  const auto refuse = [](const std::string& what) { throw CLI::ValidationError(what); };
  if (options.gpt.n_embd % options.gpt.n_head != 0)
    refuse(fmt::format("gpt_config.n_embd {} is no multiple of n_head {}", options.gpt.n_embd,
                       options.gpt.n_head));
  if (const auto& dtype = options.trainer.amp_dtype; dtype != "float16" && dtype != "bfloat16")
    refuse(fmt::format("trainer_config.amp_dtype is '{}': give float16 or bfloat16", dtype));
}

int main(int argc, char** argv) {
  Options options;
  const auto keys = keys_of(options);
  CLI::App app("Trains a character-level GPT with several processes.");
  app.option_defaults()->always_capture_default();
  std::string config, data_path;
  std::vector<std::string> overrides;
  app.add_option("--config", config, "TOML file of keys, such as mingpt.toml")->take_last();
  app.add_option("--data-path", data_path, "file of text, as data_config.path")->take_last();
  app.add_option("overrides", overrides, "section.key=value, over the file's")->take_all();
  std::string footer = "Keys of the file and of overrides, with their defaults:\n";
  for (const Key& key : keys)
    footer += fmt::format("  {:<46}{}\n", key.name + "=" + value_text(key), key.help);
  app.footer(footer + "\n");
  app.callback([&] {
    if (std::error_code ignored; std::filesystem::is_directory(config, ignored))  // parse_file finds no keys
      throw CLI::ValidationError("--config", config + " is a folder: give a TOML file such as mingpt.toml");
    if (!config.empty()) read_table(keys, config, toml::parse_file(config));
    for (const auto& argument : overrides) read_override(keys, argument);
    if (!data_path.empty()) options.data.path = data_path;
    check_together(options);
    const auto refuse = [&](std::string_view key, const std::string& why) {
      for (const std::string& argument : overrides)
        if (argument.starts_with(key)) throw CLI::ValidationError(argument, why + ": leave it out");
    };
    if (!data_path.empty()) refuse("data_config.path=", "--data-path gives the text already");
    if (!options.trainer.use_amp) refuse("trainer_config.amp_dtype=", "without use_amp it has no use");
    if (options.sample.number == 0)
      for (const char* key : {"sample_config.length=", "sample_config.temperature="})
        refuse(key, "with sample_config.number=0 it has no use");
  });
  try {
    if (const auto code = lockstep::parse(app, argc, argv)) return *code;
  } catch (const toml::parse_error& error) {
    const auto line = error.source().begin.line;  // 0 for a file that cannot be opened
    std::cerr << fmt::format("error: --config: {}{}: {}; give a TOML file such as mingpt.toml\n", config,
                             line > 0 ? fmt::format(", line {}", line) : "", error.description());
    return 2;
  }
  const auto run = [&](const lockstep::World& world) {
    world.rank_zero([&] {
      lockstep::require_writable(options.trainer.snapshot_path, "trainer_config.snapshot_path");
      if (!options.trainer.loss_path.empty())
        lockstep::require_writable(options.trainer.loss_path, "trainer_config.loss_path");
      if (const std::filesystem::path folder = options.trainer.report_dir; !folder.empty()) {
        std::error_code ignored;  // require_writable says why there is no folder
        std::filesystem::create_directories(folder, ignored);
        lockstep::require_writable(folder / "report.html", "trainer_config.report_dir");
      }
    });
    const Text text = read_text(options);
    lockstep::with_device(world, [&]<class Comm>(Comm comm) {
      if (!options.trainer.use_amp)
        train<lockstep::Fp32>(world, options, text, std::move(comm));
      else if (options.trainer.amp_dtype == "float16")
        train<lockstep::Fp16>(world, options, text, std::move(comm));
      else
        train<lockstep::Bf16>(world, options, text, std::move(comm));
    });
  };
  // The lines of several ranks name theirs already: no prefix.
  return lockstep::launch(argc, argv, run, {.prefix = lockstep::Prefix::never});
}

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <map>

#include "environment.h"
#include "nodelist.h"
#include "weft/membership.h"

namespace weft::membership {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::StartsWith;

using Variables = std::map<std::string, std::string>;

Lookup lookup_in(Variables variables) {
  return [variables = std::move(variables)](const char* name) {
    const auto found = variables.find(name);
    return found == variables.end() ? std::nullopt : std::optional(found->second);
  };
}

Result<Membership> member(const Variables& variables) {
  return from_environment(lookup_in(variables));
}

// The variables with one of them changed, or taken away.
Variables with(Variables variables, const std::string& name, std::optional<std::string> value) {
  variables.erase(name);
  if (value) variables[name] = *value;
  return variables;
}

std::string complaint(const Variables& variables) {
  const auto membership = member(variables);
  return membership.ok() ? "no complaint" : membership.error().message();
}

const std::string kSecret(64, 'a');
const Variables kTorchrun = {{"RANK", "3"},
                             {"WORLD_SIZE", "4"},
                             {"LOCAL_RANK", "1"},
                             {"LOCAL_WORLD_SIZE", "2"},
                             {"MASTER_ADDR", "10.0.0.1"},
                             {"MASTER_PORT", "29500"},
                             {"TORCHELASTIC_RUN_ID", "run"},
                             {"WEFT_SECRET", kSecret}};
const Variables kOpenMpi = {
    {"OMPI_COMM_WORLD_RANK", "1"},       {"OMPI_COMM_WORLD_SIZE", "2"},
    {"OMPI_COMM_WORLD_LOCAL_RANK", "1"}, {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"},
    {"PMIX_NAMESPACE", "1667432449"},    {"WEFT_SECRET", kSecret}};
const Variables kMpich = {{"PMI_RANK", "1"},
                          {"PMI_SIZE", "2"},
                          {"MPI_LOCALRANKID", "1"},
                          {"MPI_LOCALNRANKS", "2"},
                          {"WEFT_SECRET", kSecret}};
const Variables kSlurm = {{"SLURM_PROCID", "5"},
                          {"SLURM_NTASKS", "7"},
                          {"SLURM_LOCALID", "1"},
                          {"SLURM_NODEID", "2"},
                          {"SLURM_STEP_TASKS_PER_NODE", "2(x3),1"},
                          {"SLURM_JOB_NODELIST", "gpu[01-04]"},
                          {"SLURM_JOB_ID", "77"},
                          {"SLURM_STEP_ID", "0"},
                          {"WEFT_SECRET", kSecret}};
const Variables kHorovod = {{"HOROVOD_RANK", "0"},
                            {"HOROVOD_SIZE", "2"},
                            {"HOROVOD_LOCAL_RANK", "0"},
                            {"HOROVOD_LOCAL_SIZE", "1"},
                            {"HOROVOD_GLOO_RENDEZVOUS_ADDR", "fd00::1"},
                            {"HOROVOD_GLOO_RENDEZVOUS_PORT", "4000"},
                            {"WEFT_SECRET", kSecret}};
const Variables kDmlc = {{"DMLC_ROLE", "worker"},        {"DMLC_WORKER_ID", "1"},
                         {"DMLC_NUM_WORKER", "2"},       {"DMLC_PS_ROOT_URI", "head"},
                         {"DMLC_PS_ROOT_PORT", "65535"}, {"WEFT_SECRET", kSecret}};

Variables merged(std::initializer_list<Variables> all) {
  Variables out;
  for (const Variables& variables : all) out.insert(variables.begin(), variables.end());
  return out;
}

TEST(Membership, OfTorchrunMeetsAbovePortOfItsStore) {
  const auto membership = member(kTorchrun);
  ASSERT_TRUE(membership.ok()) << membership.error().message();
  EXPECT_EQ(membership->launcher, "torchrun");
  EXPECT_EQ(membership->rank, 3u);
  EXPECT_EQ(membership->size, 4u);
  EXPECT_EQ(membership->local_rank, 1u);
  EXPECT_EQ(membership->local_size, 2u);
  EXPECT_EQ(membership->rendezvous, "10.0.0.1:29501");
  EXPECT_EQ(membership->secret, kSecret);
  EXPECT_EQ(membership->host, host_name());
  EXPECT_THAT(complaint(with(kTorchrun, "MASTER_PORT", "0")), StartsWith("MASTER_PORT is \"0\""));
  EXPECT_THAT(complaint(with(kTorchrun, "MASTER_ADDR", std::nullopt)),
              StartsWith("MASTER_ADDR is not set"));
  EXPECT_THAT(complaint(with(kTorchrun, "MASTER_ADDR", "a b")), StartsWith("MASTER_ADDR is"));
  EXPECT_EQ(member(with(kTorchrun, "MASTER_PORT", "65535"))->rendezvous, "10.0.0.1:1024");
}

TEST(Membership, LocalRanksMayBeUnknown) {
  const auto membership =
      member(with(with(kTorchrun, "LOCAL_RANK", std::nullopt), "LOCAL_WORLD_SIZE", std::nullopt));
  ASSERT_TRUE(membership.ok());
  EXPECT_EQ(membership->local_size, 0u);
}

TEST(Membership, OfOpenMpiOnOneHostMeetsInAFile) {
  const Variables here =
      with(with(kOpenMpi, "TMPDIR", ::testing::TempDir()), "WEFT_SECRET", std::nullopt);
  const auto membership = member(here);
  ASSERT_TRUE(membership.ok()) << membership.error().message();
  EXPECT_EQ(membership->launcher, "Open MPI");
  EXPECT_THAT(membership->rendezvous,
              StartsWith("file:" + ::testing::TempDir() + "/weft-" + std::to_string(getuid())));
  // The same for all ranks of a job, and another for another job.
  const auto other_rank =
      member(with(with(here, "OMPI_COMM_WORLD_RANK", "0"), "OMPI_COMM_WORLD_LOCAL_RANK", "0"));
  EXPECT_EQ(other_rank->rendezvous, membership->rendezvous);
  EXPECT_EQ(other_rank->secret, membership->secret);
  const auto other_job = member(with(here, "PMIX_NAMESPACE", "1667432450"));
  EXPECT_NE(other_job->rendezvous, membership->rendezvous);
  EXPECT_NE(other_job->secret, membership->secret);
  EXPECT_THAT(complaint(with(here, "PMIX_NAMESPACE", std::nullopt)),
              HasSubstr("OMPI_MCA_ess_base_jobid is not set"));
}

TEST(Membership, OfOpenMpiOnSeveralHostsAsksForTheRendezvous) {
  const Variables two =
      with(with(kOpenMpi, "OMPI_COMM_WORLD_LOCAL_SIZE", "1"), "OMPI_COMM_WORLD_LOCAL_RANK", "0");
  EXPECT_THAT(complaint(two), AllOf(StartsWith("WEFT_RENDEZVOUS is not set"),
                                    HasSubstr("1 of 2 ranks are on this host")));
  const auto membership = member(with(two, "WEFT_RENDEZVOUS", "10.0.0.1:5000"));
  ASSERT_TRUE(membership.ok()) << membership.error().message();
  EXPECT_EQ(membership->rendezvous, "10.0.0.1:5000");
}

TEST(Membership, OfMpichNeedsHydraAbove) {
  // No Hydra started this test.
  EXPECT_THAT(complaint(kMpich), HasSubstr("no process above this one is Hydra's pmi_proxy"));
  EXPECT_THAT(complaint(with(kMpich, "MPI_LOCALNRANKS", std::nullopt)),
              HasSubstr("an unknown number of 2 ranks"));
  // Ranks on several hosts have no file in common.
  EXPECT_THAT(
      complaint(with(with(with(with(kMpich, "MPI_LOCALNRANKS", "1"), "MPI_LOCALRANKID", "0"),
                          "WEFT_RENDEZVOUS", "10.0.0.1:5000"),
                     "WEFT_SECRET", std::nullopt)),
      AllOf(StartsWith("WEFT_SECRET is not set"), HasSubstr("before mpiexec")));
  const auto membership = member(
      with(with(kMpich, "WEFT_RENDEZVOUS", "file:/run/x"), "WEFT_SECRET", std::string(64, 'a')));
  ASSERT_TRUE(membership.ok()) << membership.error().message();
  EXPECT_EQ(membership->launcher, "MPICH");
  EXPECT_EQ(membership->rendezvous, "file:/run/x");
}

TEST(Membership, OfSlurmMeetsAtTheFirstHost) {
  const auto membership = member(kSlurm);
  ASSERT_TRUE(membership.ok()) << membership.error().message();
  EXPECT_EQ(membership->launcher, "Slurm");
  EXPECT_EQ(membership->rank, 5u);
  EXPECT_EQ(membership->size, 7u);
  EXPECT_EQ(membership->local_size, 2u);
  EXPECT_EQ(membership->rendezvous, "gpu01:22387");
  EXPECT_NE(member(with(kSlurm, "SLURM_STEP_ID", "1"))->rendezvous, membership->rendezvous);
  EXPECT_NE(member(with(kSlurm, "SLURM_JOB_ID", "78"))->rendezvous, membership->rendezvous);
  // A step on some of the job's hosts, with fewer tasks than the job.
  const auto step =
      member(with(with(with(kSlurm, "SLURM_STEP_NODELIST", "gpu03"), "SLURM_STEP_NUM_TASKS", "6"),
                  "SLURM_STEP_TASKS_PER_NODE", "2(x3)"));
  ASSERT_TRUE(step.ok()) << step.error().message();
  EXPECT_EQ(step->size, 6u);
  EXPECT_EQ(step->rendezvous, "gpu03:22387");
  EXPECT_THAT(complaint(with(kSlurm, "SLURM_JOB_NODELIST", "gpu[1-")),
              StartsWith("SLURM_JOB_NODELIST: \"gpu[1-\" is no list of hosts"));
  EXPECT_THAT(complaint(with(kSlurm, "SLURM_JOB_ID", "x")), StartsWith("SLURM_JOB_ID is \"x\""));
  EXPECT_THAT(complaint(with(kSlurm, "SLURM_STEP_TASKS_PER_NODE", "8(x3)")),
              StartsWith("SLURM_STEP_TASKS_PER_NODE"));
  // The batch script itself is no rank.
  EXPECT_THAT(complaint(with(kSlurm, "SLURM_STEP_ID", std::nullopt)),
              HasSubstr("nobody started this process as a rank"));
}

TEST(Membership, OfHorovodAndDmlc) {
  const auto horovod = member(kHorovod);
  ASSERT_TRUE(horovod.ok()) << horovod.error().message();
  EXPECT_EQ(horovod->launcher, "Horovod");
  EXPECT_EQ(horovod->rendezvous, "[fd00::1]:4001");
  const auto dmlc = member(kDmlc);
  ASSERT_TRUE(dmlc.ok()) << dmlc.error().message();
  EXPECT_EQ(dmlc->launcher, "DMLC");
  EXPECT_EQ(dmlc->rank, 1u);
  EXPECT_EQ(dmlc->rendezvous, "head:1024");
  for (const char* role : {"server", "scheduler", ""}) {
    EXPECT_THAT(complaint(with(kDmlc, "DMLC_ROLE", role)),
                StartsWith(text("DMLC_ROLE is \"%s\"", role)));
  }
}

TEST(Membership, TheFirstLauncherOfTheListWins) {
  const Variables weft = {{"WEFT_RANK", "0"},
                          {"WEFT_SIZE", "1"},
                          {"WEFT_RENDEZVOUS", "127.0.0.1:1"},
                          {"WEFT_SECRET", std::string(32, '0')}};
  std::initializer_list<Variables> all = {weft,   kTorchrun, kOpenMpi, kMpich,
                                          kSlurm, kHorovod,  kDmlc};
  const std::vector<std::string> names = {"weft",  "torchrun", "Open MPI", "MPICH",
                                          "Slurm", "Horovod",  "DMLC"};
  for (size_t i = 0; i < names.size(); ++i) {
    Variables rest;
    for (size_t j = i; j < names.size(); ++j) rest = merged({rest, all.begin()[j]});
    EXPECT_EQ(launcher(lookup_in(rest)), names[i]);
  }
  EXPECT_EQ(launcher(lookup_in({})), std::nullopt);
  // srun speaks PMI too, but tells more by its own variables.
  EXPECT_EQ(launcher(lookup_in(merged({kSlurm, with(kMpich, "MPI_LOCALNRANKS", std::nullopt)}))),
            "Slurm");
}

TEST(Membership, BadNumbersAreNamed) {
  const struct {
    const Variables& variables;
    const char* rank;
    const char* size;
    const char* local_rank;
  } launchers[] = {
      {kTorchrun, "RANK", "WORLD_SIZE", "LOCAL_RANK"},
      {kOpenMpi, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"},
      {kMpich, "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"},
      {kSlurm, "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"},
      {kHorovod, "HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK"},
      {kDmlc, "DMLC_WORKER_ID", "DMLC_NUM_WORKER", nullptr},
  };
  for (const auto& launcher : launchers) {
    for (const char* bad : {"-1", "", "x", "70000", "1.5", "99999999999999999999", " 1"}) {
      for (const char* name : {launcher.rank, launcher.size, launcher.local_rank}) {
        if (name == nullptr) continue;
        EXPECT_THAT(complaint(with(launcher.variables, name, bad)),
                    StartsWith(text("%s is \"%s\"", name, bad)));
      }
    }
    EXPECT_THAT(complaint(with(launcher.variables, launcher.size, "0")),
                StartsWith(text("%s is \"0\"", launcher.size)));
    EXPECT_THAT(complaint(with(launcher.variables, launcher.rank, "7")),
                AllOf(StartsWith(text("%s is \"7\"", launcher.rank)), HasSubstr(launcher.size)));
  }
  EXPECT_THAT(complaint(with(kTorchrun, "LOCAL_WORLD_SIZE", "5")),
              StartsWith("LOCAL_WORLD_SIZE is \"5\""));
  EXPECT_THAT(complaint(with(kTorchrun, "LOCAL_RANK", "2")), StartsWith("LOCAL_RANK is \"2\""));
  // Control characters do not reach a terminal.
  EXPECT_THAT(complaint(with(kTorchrun, "RANK", "\x1b[2J")), StartsWith("RANK is \"?[2J\""));
}

TEST(Membership, OwnRendezvousWins) {
  for (const char* value : {"10.0.0.1:1", "[::1]:65535", "name:80", "file:/run/meet"}) {
    EXPECT_EQ(member(with(kSlurm, "WEFT_RENDEZVOUS", value))->rendezvous, value);
  }
  for (const char* value : {"", "file:", "file:relative", "::1:5", "host", "a b:5", "a/b:5"}) {
    EXPECT_THAT(complaint(with(kSlurm, "WEFT_RENDEZVOUS", value)), StartsWith("WEFT_RENDEZVOUS is"))
        << value;
  }
  EXPECT_EQ(member(with(kSlurm, "WEFT_INTERFACE", "eth1"))->interface, "eth1");
}

// ---- weft's own ----------------------------------------------------------------------------

class OwnVariables : public ::testing::Test {
 protected:
  void SetUp() override {
    set("WEFT_RANK", "1");
    set("WEFT_SIZE", "4");
    set("WEFT_RENDEZVOUS", "127.0.0.1:5000");
    set("WEFT_SECRET", new_secret().c_str());
  }
  void TearDown() override {
    for (const char* name : {"WEFT_RANK", "WEFT_SIZE", "WEFT_RENDEZVOUS", "WEFT_SECRET"}) {
      unsetenv(name);
    }
  }
  static void set(const char* name, const char* value) {
    if (value == nullptr) {
      unsetenv(name);
    } else {
      setenv(name, value, 1);
    }
  }
  // What is said when one variable is wrong and the others are right.
  std::string complaint(const char* name, const char* value) {
    SetUp();
    set(name, value);
    const auto membership = from_environment();
    return membership.ok() ? "" : membership.error().message();
  }
};

TEST_F(OwnVariables, IsRead) {
  const auto membership = from_environment();
  ASSERT_TRUE(membership.ok()) << membership.error().message();
  EXPECT_EQ(membership->rank, 1u);
  EXPECT_EQ(membership->size, 4u);
  EXPECT_EQ(membership->rendezvous, "127.0.0.1:5000");
  EXPECT_EQ(membership->secret.size(), 64u);
  EXPECT_EQ(complaint("WEFT_RENDEZVOUS", "[::1]:80"), "");
  EXPECT_EQ(complaint("WEFT_RENDEZVOUS", "node-3.local:80"), "");
}

TEST_F(OwnVariables, SaysWhichVariableIsWrongAndWhatIsExpected) {
  for (const char* name : {"WEFT_RANK", "WEFT_SIZE", "WEFT_RENDEZVOUS", "WEFT_SECRET"}) {
    EXPECT_THAT(complaint(name, nullptr), StartsWith(std::string(name) + " is not set"));
  }
  for (const char* value : {"4", "-1", "1x", "", " 1", "99999999999999999999", "0x1"}) {
    EXPECT_THAT(complaint("WEFT_RANK", value),
                StartsWith(std::string("WEFT_RANK is \"") + value + "\": expected"));
  }
  for (const char* value : {"0", "65536", "four"}) {
    EXPECT_THAT(complaint("WEFT_SIZE", value), HasSubstr("1 to 65535"));
  }
  for (const char* value :
       {"", "host", ":80", "host:", "host:0", "host:65536", "host:8x", "::1:80"}) {
    EXPECT_THAT(complaint("WEFT_RENDEZVOUS", value), HasSubstr("ADDRESS:PORT")) << value;
  }
  for (const char* value : {"", "abc", "00112233445566778899aabbccddeeffzz"}) {
    const std::string said = complaint("WEFT_SECRET", value);
    EXPECT_THAT(said, HasSubstr("hexadecimal"));
    // A secret stays one.
    EXPECT_TRUE(*value == 0 || said.find(value) == std::string::npos) << said;
  }
}

// ---- lists ---------------------------------------------------------------------------------

TEST(NodeList, IsExpanded) {
  EXPECT_THAT(*expand_nodes("gpu[01-04,7],login1"),
              ElementsAre("gpu01", "gpu02", "gpu03", "gpu04", "gpu7", "login1"));
  EXPECT_THAT(*expand_nodes("one"), ElementsAre("one"));
  EXPECT_THAT(*expand_nodes("r[1-2]n[8-9]-x"), ElementsAre("r1n8-x", "r1n9-x", "r2n8-x", "r2n9-x"));
  EXPECT_THAT(*expand_nodes("n[098-101]"), ElementsAre("n098", "n099", "n100", "n101"));
  EXPECT_EQ(expand_nodes("n[1-65535]")->size(), 65535u);
}

TEST(NodeList, GarbageIsRefused) {
  for (const char* list :
       {"", ",", "a,", ",a", "a[", "a]", "a[]", "a[1-]", "a[-1]", "a[2-1]", "a[1,]", "a[x]",
        "a[[1]]", "a[1-65536]", "a[1-1000]b[1-1000]", "a[1-99999999999]",
        "a[00000000000000000001-2]", "a[0-4294967295]", "a[1-2],b[1-65535]"}) {
    EXPECT_FALSE(expand_nodes(list).ok()) << list;
  }
  EXPECT_FALSE(expand_nodes(std::string(300, 'x')).ok());
  EXPECT_FALSE(expand_nodes(std::string(2 << 20, ',')).ok());
}

TEST(Counts, AreExpanded) {
  EXPECT_THAT(*expand_counts("2(x3),1"), ElementsAre(2, 2, 2, 1));
  EXPECT_THAT(*expand_counts("4"), ElementsAre(4));
  for (const char* list : {"", "x", "2(x", "2(x3", "2(x)", "(x3)", "2,", "1(x70000)", "-1"}) {
    EXPECT_FALSE(expand_counts(list).ok()) << list;
  }
}

TEST(Ancestor, IsFoundByName) {
  // Whoever started this process has a name.
  const auto parent = read_file(text("/proc/%d/comm", static_cast<int>(getppid())), kib(1));
  ASSERT_TRUE(parent.ok());
  const auto found = ancestor_named(parent->substr(0, parent->find('\n')));
  ASSERT_TRUE(found.has_value());
  EXPECT_THAT(*found, StartsWith(std::to_string(getppid()) + "@"));
  EXPECT_EQ(ancestor_named("no process has this name"), std::nullopt);
}

}  // namespace
}  // namespace weft::membership

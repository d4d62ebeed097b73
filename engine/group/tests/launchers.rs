//! The variables that each launcher sets, as they were seen, and what is made of them.

use std::collections::HashMap;

use super::*;
use crate::group::Rendezvous;

fn with<T>(vars: &[(&str, &str)], read: impl Fn(Lookup<'_>) -> T) -> T {
    let vars: HashMap<&str, &str> = vars.iter().copied().collect();
    read(&|name| vars.get(name).map(|value| value.to_string()))
}

fn place_of(vars: &[(&str, &str)]) -> (Rank, usize) {
    with(vars, place).unwrap()
}

fn address_of(vars: &[(&str, &str)]) -> String {
    match with(vars, meeting).unwrap() {
        Meeting::At(address) => address.to_string(),
        Meeting::Note(path) => path.display().to_string(),
    }
}

fn error_of(vars: &[(&str, &str)]) -> String {
    with(vars, meeting).unwrap_err()
}

/// These variables without those named.
fn without<'a>(vars: &[(&'a str, &'a str)], names: &[&str]) -> Vec<(&'a str, &'a str)> {
    vars.iter().copied().filter(|(name, _)| !names.contains(name)).collect()
}

const TORCHRUN: [(&str, &str); 7] = [
    ("RANK", "1"),
    ("WORLD_SIZE", "2"),
    ("LOCAL_RANK", "1"),
    ("MASTER_ADDR", "node0"),
    ("MASTER_PORT", "29500"),
    ("TORCHELASTIC_USE_AGENT_STORE", "True"),
    ("TORCHELASTIC_RUN_ID", "none"),
];

#[test]
fn under_torchrun_ranks_meet_beside_the_agents_store() {
    assert_eq!(place_of(&TORCHRUN), (1, 2));
    assert_eq!(address_of(&TORCHRUN), "node0:19500");
    let without_store = [&without(&TORCHRUN, &["TORCHELASTIC_USE_AGENT_STORE"])[..]].concat();
    assert_eq!(address_of(&without_store), "node0:29500");
    let off = [&without_store[..], &[("TORCHELASTIC_USE_AGENT_STORE", "False")]].concat();
    assert_eq!(address_of(&off), "node0:29500");
    let own = [&TORCHRUN[..], &[("ALLSTREAM_PORT", "4000")]].concat();
    assert_eq!(address_of(&own), "node0:4000");
    assert!(error_of(&[&TORCHRUN[..], &[("ALLSTREAM_PORT", "0")]].concat()).contains("ALLSTREAM_PORT"));
}

#[test]
fn a_derived_port_is_another_and_not_one_that_the_system_gives_out() {
    for port in 1..=u16::MAX {
        let other = derived(&|_| None, port.into()).unwrap();
        assert!((10_000..30_000).contains(&other) && other != port, "{port}: {other}");
    }
    assert_ne!(derived(&|_| None, 29_500), derived(&|_| None, 29_501));
    // Where the user says which ports a firewall lets through, the derived port is one of those.
    let open = |name: &str| (name == "ALLSTREAM_PORTS").then(|| "29400-29599".to_string());
    for port in 29_300..29_700 {
        let other = derived(&open, port.into()).unwrap();
        assert!((29_400..=29_599).contains(&other) && other != port, "{port}: {other}");
    }
    // Jobs that were started one after another have numbers that follow each other, whether or not these are ports of the range.
    for (first, last) in [(29_400, 29_599), (30_000, 30_002), (29_501, 29_502)] {
        let open = |name: &str| (name == "ALLSTREAM_PORTS").then(|| format!("{first}-{last}"));
        for port in 29_300..30_100 {
            assert_ne!(derived(&open, port), derived(&open, port + 1), "{first}-{last}, {port}");
            assert_ne!(derived(&open, port).map(u64::from), Ok(port), "{first}-{last}");
        }
    }
    assert!(derived(&|_| Some("9-8".into()), 1).unwrap_err().contains("ALLSTREAM_PORTS"));
}

/// As Open MPI 4.1 sets them.
const OPEN_MPI: [(&str, &str); 7] = [
    ("OMPI_COMM_WORLD_RANK", "1"),
    ("OMPI_COMM_WORLD_SIZE", "2"),
    ("OMPI_COMM_WORLD_LOCAL_RANK", "1"),
    ("OMPI_COMM_WORLD_LOCAL_SIZE", "2"),
    ("PMIX_RANK", "1"),
    ("PMIX_NAMESPACE", "759169025"),
    ("PMIX_SERVER_TMPDIR", "/tmp/ompi.node.0/pid.168"),
];

#[test]
fn under_mpirun_on_one_host_a_note_says_where_and_nothing_needs_to_be_set() {
    assert_eq!(place_of(&OPEN_MPI), (1, 2));
    assert_eq!(address_of(&OPEN_MPI), "/tmp/ompi.node.0/pid.168/allstream-759169025");
    let named = [&without(&OPEN_MPI, &["PMIX_NAMESPACE"])[..], &[("PMIX_NAMESPACE", "prte/a@1")]].concat();
    assert_eq!(address_of(&named), "/tmp/ompi.node.0/pid.168/allstream-prte_a_1");
    // The same in an allocation of Slurm, whose variables there are those of the batch script.
    let slurm =
        [&OPEN_MPI[..], &[("SLURM_PROCID", "0"), ("SLURM_NTASKS", "8"), ("SLURM_JOB_ID", "5")]].concat();
    assert_eq!((place_of(&slurm), address_of(&slurm)), ((1, 2), address_of(&OPEN_MPI)));
    let rendezvous = with(&OPEN_MPI, |get| Rendezvous::from_lookup(get)).unwrap();
    assert!(rendezvous.address.is_none() && rendezvous.token.is_none());
    assert_eq!(rendezvous.place(), address_of(&OPEN_MPI));
}

#[test]
fn under_mpirun_what_is_said_counts() {
    let said = [&OPEN_MPI[..], &[("MASTER_ADDR", "node0"), ("MASTER_PORT", "29600")]].concat();
    assert_eq!(address_of(&said), "node0:29600");
    // Half of an address is an error, and is not ignored.
    assert!(error_of(&[&OPEN_MPI[..], &[("MASTER_ADDR", "node0")]].concat()).contains("MASTER_PORT"));
    assert!(error_of(&[&OPEN_MPI[..], &[("MASTER_PORT", "29600")]].concat()).contains("MASTER_ADDR"));
}

#[test]
fn under_mpirun_on_several_hosts_the_address_has_to_be_said() {
    let several =
        [&without(&OPEN_MPI, &["OMPI_COMM_WORLD_LOCAL_SIZE"])[..], &[("OMPI_COMM_WORLD_LOCAL_SIZE", "1")]];
    let error = error_of(&several.concat());
    assert!(error.contains("Open MPI does not say") && error.contains("-x MASTER_ADDR="), "{error}");
}

#[test]
fn under_mpich_rank_and_size_are_found_and_the_address_has_to_be_said() {
    let mpich = [("PMI_RANK", "3"), ("PMI_SIZE", "4"), ("SLURM_PROCID", "0"), ("SLURM_NTASKS", "2")];
    assert_eq!(place_of(&mpich), (3, 4));
    let error = error_of(&mpich[..2]);
    assert!(error.contains("-genv MASTER_ADDR"), "{error}");
    assert!(with(&[("PMIX_RANK", "1")], place).unwrap_err().contains("PMIx has no variable for the size"));
}

/// As srun sets them, on nodes node[01-04,07].
const SRUN: [(&str, &str); 7] = [
    ("SLURM_PROCID", "5"),
    ("SLURM_NTASKS", "10"),
    ("SLURM_STEP_NUM_TASKS", "10"),
    ("SLURM_STEP_NODELIST", "node[01-04,07]"),
    ("SLURM_LAUNCH_NODE_IPADDR", "10.0.0.9"),
    ("SLURM_JOB_ID", "123456"),
    ("SLURM_STEP_ID", "0"),
];

#[test]
fn under_srun_ranks_meet_on_the_first_node_of_the_step() {
    assert_eq!(place_of(&SRUN), (5, 10));
    assert_eq!(address_of(&SRUN), "node01:13456");
    // A step of fewer tasks than the job.
    let step = [&without(&SRUN, &["SLURM_STEP_NUM_TASKS"])[..], &[("SLURM_STEP_NUM_TASKS", "6")]].concat();
    assert_eq!(place_of(&step), (5, 6));
    assert_eq!(place_of(&without(&SRUN, &["SLURM_STEP_NUM_TASKS"])), (5, 10));
    let one = [&without(&SRUN, &["SLURM_STEP_NODELIST"])[..], &[("SLURM_STEP_NODELIST", "node07")]].concat();
    assert_eq!(address_of(&one), "127.0.0.1:13456");
    let launch = without(&SRUN, &["SLURM_STEP_NODELIST"]);
    assert_eq!(address_of(&launch), "10.0.0.9:13456");
    let job = [&launch[..], &[("SLURM_JOB_NODELIST", "a1,b2")]].concat();
    assert_eq!(address_of(&job), "a1:13456");
    let said = [&SRUN[..], &[("MASTER_ADDR", "head"), ("MASTER_PORT", "29600")]].concat();
    assert_eq!(address_of(&said), "head:29600");
    // The first node of the job may have no rank of the step, so it is not taken in place of a list that cannot be read.
    let unread = [&job[..], &[("SLURM_STEP_NODELIST", "node[01-04")]].concat();
    let error = error_of(&unread);
    assert!(
        error.contains("SLURM_STEP_NODELIST is `node[01-04`") && error.contains("MASTER_ADDR"),
        "{error}"
    );
}

#[test]
fn under_srun_ports_are_reserved_ones_or_of_the_job_and_step() {
    let with_port = |extra: &[(&'static str, &'static str)], less: &[&str]| {
        address_of(&[&without(&SRUN, less)[..], extra].concat())
    };
    assert_eq!(with_port(&[("SLURM_STEP_RESV_PORTS", "12000-12003,12009")], &[]), "node01:12000");
    assert_eq!(with_port(&[("SLURM_STEP_ID", "1")], &["SLURM_STEP_ID"]), "node01:14069");
    assert_eq!(with_port(&[("SLURM_STEPID", "1")], &["SLURM_STEP_ID"]), "node01:14069");
    assert_eq!(with_port(&[("SLURM_JOB_ID", "123457")], &["SLURM_JOB_ID"]), "node01:13457");
    // Huge numbers.
    with_port(&[("SLURM_STEP_ID", "4294967279")], &["SLURM_STEP_ID"]);
    assert!(error_of(&without(&SRUN, &["SLURM_JOB_ID"])).contains("MASTER_PORT"));
}

#[test]
fn lists_of_nodes() {
    for (list, first, only) in [
        ("node1", "node1", true),
        ("node1,node2", "node1", false),
        ("node[01-04,7]", "node01", false),
        ("node[7,01-04]", "node7", false),
        ("node[3]", "node3", true),
        ("rack[1-2]n[03,5]", "rack1n03", false),
        ("a[1-2]-x,b", "a1-x", false),
        ("gpu-3.cluster", "gpu-3.cluster", true),
    ] {
        assert_eq!(first_node(list), Some((first.into(), only)), "{list}");
    }
    for bad in ["", ",a", "node[1", "node]1", "[,"] {
        assert_eq!(first_node(bad), None, "{bad}");
    }
}

fn place_error(vars: &[&[(&str, &str)]]) -> String {
    with(&vars.concat(), place).unwrap_err()
}

/// As sbatch sets them for the script itself. Which variable for a step's number it sets besides, if any, depends on Slurm's version.
const SBATCH: [(&str, &str); 5] = [
    ("SLURM_PROCID", "0"),
    ("SLURM_NTASKS", "4"),
    ("SLURM_JOB_ID", "77"),
    ("SLURM_JOB_NODELIST", "node[1-2]"),
    ("SLURM_TASK_PID", "1234"),
];

#[test]
fn a_batch_script_that_started_no_step_is_told_to_use_srun() {
    for step in [&[][..], &[("SLURM_STEP_ID", "4294967291")], &[("SLURM_STEPID", "4294967291")]] {
        let error = place_error(&[&SBATCH, step]);
        assert!(error.contains("SLURM_PROCID=0 and SLURM_NTASKS=4"), "{error}");
        assert!(error.contains("`srun python train.py`") && error.contains("RANK=0 WORLD_SIZE=1"), "{error}");
    }
    // A job of one task is a world of one rank; and RANK and WORLD_SIZE, where they are set, are believed.
    let one = [&without(&SBATCH, &["SLURM_NTASKS"])[..], &[("SLURM_NTASKS", "1")]].concat();
    assert_eq!(place_of(&one), (0, 1));
    assert_eq!(place_of(&[&SBATCH[..], &[("RANK", "0"), ("WORLD_SIZE", "1")]].concat()), (0, 1));
    // A process of a step that the script has started, and one that mpirun has started in the script.
    assert_eq!(place_of(&[&SBATCH[..], &[("SLURM_STEP_ID", "0")]].concat()), (0, 4));
    assert_eq!(place_of(&[&SBATCH[..], &OPEN_MPI].concat()), (1, 2));
}

#[test]
fn two_launchers_that_disagree_are_both_named() {
    let pod = [("RANK", "0"), ("WORLD_SIZE", "2")];
    let mpich = [("PMI_RANK", "3"), ("PMI_SIZE", "8")];
    for (inner, its) in [
        (&OPEN_MPI[..], "OMPI_COMM_WORLD_RANK=1 and OMPI_COMM_WORLD_SIZE=2"),
        (&mpich, "PMI_RANK=3 and PMI_SIZE=8"),
        (
            &[("SLURM_PROCID", "1"), ("SLURM_NTASKS", "2"), ("SLURM_STEP_ID", "0")],
            "SLURM_PROCID=1 and SLURM_NTASKS=2",
        ),
    ] {
        let error = place_error(&[&pod, inner]);
        assert!(error.contains("RANK=0 and WORLD_SIZE=2") && error.contains(its), "{error}");
        assert!(error.contains("env -u RANK -u WORLD_SIZE"), "{error}");
    }
    let error = place_error(&[&OPEN_MPI, &mpich]);
    assert!(error.contains("OMPI_COMM_WORLD_SIZE=2") && error.contains("PMI_SIZE=8"), "{error}");
    // Launchers that say the same do not disagree.
    assert_eq!(place_of(&[&[("RANK", "1"), ("WORLD_SIZE", "2")], &OPEN_MPI[..]].concat()), (1, 2));
}

#[test]
fn as_which_rank_a_process_that_is_none_goes_to_rank_0() {
    let disputed = |vars: &[&[(&str, &str)]]| with(&vars.concat(), disputed);
    let pod = |rank| [("RANK", rank), ("WORLD_SIZE", "2")];
    let inner = |rank| [("OMPI_COMM_WORLD_RANK", rank), ("OMPI_COMM_WORLD_SIZE", "2")];
    // It goes as the rank that is not 0, as rank 0 itself may be there.
    assert_eq!(disputed(&[&pod("0"), &inner("1")]), Some((1, 2)));
    assert_eq!(disputed(&[&pod("1"), &inner("0")]), Some((1, 2)));
    assert_eq!(disputed(&[&pod("1"), &inner("1")]), None);
    // Worlds of different sizes, and a rank that does not exist: there is no rank 0 to tell.
    assert_eq!(disputed(&[&pod("0"), &[("PMI_RANK", "3"), ("PMI_SIZE", "8")]]), None);
    assert_eq!(disputed(&[&pod("0"), &inner("2")]), None);
    assert_eq!(disputed(&[&pod("0")]), None);
}

#[test]
fn a_launcher_inside_another_one_is_believed() {
    // One torchrun for each host, started by mpirun or srun.
    let torchrun = [("RANK", "5"), ("WORLD_SIZE", "8"), ("LOCAL_RANK", "1"), ("TORCHELASTIC_RUN_ID", "none")];
    let srun = [("SLURM_PROCID", "1"), ("SLURM_NTASKS", "2"), ("SLURM_STEP_ID", "0")];
    for outer in [&OPEN_MPI[..], &srun] {
        assert_eq!(place_of(&[&torchrun, outer].concat()), (5, 8));
        // Or by a script of the user's own.
        assert_eq!(place_of(&[&torchrun[..3], outer].concat()), (5, 8));
    }
    // mpirun started by srun, whose PMI variables are those of the step.
    let step = [("PMI_RANK", "0"), ("PMI_SIZE", "1"), ("SLURM_PROCID", "0"), ("SLURM_STEP_NUM_TASKS", "1")];
    assert_eq!(place_of(&[&OPEN_MPI[..], &step].concat()), (1, 2));
}

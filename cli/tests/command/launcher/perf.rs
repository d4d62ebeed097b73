//! `allstream perf`: every collective is timed and checked, the figures are left where they were asked for, and what
//! makes no sense is refused. No test here looks at how fast anything is.

use std::process::Output;

use super::*;

fn perf(arguments: &[&str]) -> Output {
    allstream(&[&["perf"], arguments].concat(), &[])
}

/// `perf` says so even if only the environment names the link, as a launcher or a user sets it.
#[test]
fn perf_says_over_which_link_its_figures_are() {
    let command = env!("CARGO_BIN_EXE_allstream");
    let job = ["run", "-n", "2", "--", command, "perf", "all_reduce", "--sizes", "8", "-n", "1", "-w", "1"];
    for link in ["tcp", "shm"] {
        let output = allstream(&job, &[("ALLSTREAM_LINK", link)]);
        let said = text(&output.stdout);
        assert!(output.status.success() && said.contains(&format!("link {link}, ")), "{said}");
    }
}

#[test]
fn perf_prints_nccl_tests_table_and_leaves_json_and_a_picture() {
    let scratch = Scratch::new();
    let (figures, picture) = (scratch.0.join("figures.json"), scratch.0.join("picture.svg"));
    let sizes = ["all_reduce", "-N", "2", "-b", "4", "-e", "1K", "-f", "16", "-n", "3", "-w", "1"];
    let more = ["--link", "shm,tcp", "--algo", "ring,direct", "-J", figures.to_str().unwrap(), "--plot"];
    let output = perf(&[&sizes[..], &more[..], &[picture.to_str().unwrap()]].concat());
    let said = text(&output.stdout);
    assert!(output.status.success(), "{said}{}", text(&output.stderr));
    assert!(
        said.contains("algbw    busbw  #wrong") && said.contains("# Out of bounds values : 0 OK"),
        "{said}"
    );
    let rows = said.lines().filter(|line| line.starts_with("  ")).count();
    assert_eq!(rows, 3 * 4, "three sizes, two links, two algorithms: {said}");
    let figures = json(&figures);
    let series = figures["series"].as_array().unwrap();
    let names: Vec<_> =
        series.iter().map(|s| (s["link"].as_str().unwrap(), s["algo"].as_str().unwrap())).collect();
    assert_eq!(names, [("shm", "ring"), ("shm", "direct"), ("tcp", "ring"), ("tcp", "direct")]);
    let row = &series[0]["rows"][2];
    assert_eq!((row["size"].as_u64(), row["count"].as_u64()), (Some(1024), Some(256)));
    let time = &row["in_place"];
    // With two ranks, the bus bandwidth equals the algorithm's.
    assert!(time["median_us"].as_f64() > Some(0.0) && time["algbw"] == time["busbw"], "{time}");
    let picture = fs::read_to_string(&picture).unwrap();
    assert!(picture.starts_with("<svg") && picture.contains("shm, ring") && picture.contains("tcp, direct"));
}

#[test]
fn perf_takes_a_list_of_sizes() {
    let scratch = Scratch::new();
    let figures = scratch.0.join("figures.json");
    let sizes = ["all_reduce", "--threads", "-N", "2", "--sizes", "4,12,64K", "-n", "2", "-w", "0", "-J"];
    let output = perf(&[&sizes[..], &[figures.to_str().unwrap()]].concat());
    assert!(output.status.success(), "{}", text(&output.stderr));
    let figures = json(&figures);
    let rows = figures["series"][0]["rows"].as_array().unwrap();
    assert_eq!(rows.iter().map(|row| row["size"].as_u64()).collect::<Vec<_>>(), [4, 12, 65536].map(Some));
}

#[test]
fn perf_sets_the_chosen_algorithm_beside_all_that_can_be_named() {
    let scratch = Scratch::new();
    let figures = scratch.0.join("figures.json");
    let sizes = ["reduce_scatter", "-N", "3", "--sizes", "12,3K", "-n", "5", "-w", "1", "--link", "shm,tcp"];
    let more = ["--check-tuning", "-J", figures.to_str().unwrap()];
    let output = perf(&[&sizes[..], &more[..]].concat());
    let said = text(&output.stdout);
    assert!(output.status.success(), "{said}{}", text(&output.stderr));
    assert_eq!(said.matches("# Tuning ").count(), 2, "{said}");
    let figures = json(&figures);
    for series in figures["series"].as_array().unwrap() {
        let choices = series["choices"].as_array().unwrap();
        assert_eq!(choices.len(), 2, "{series}");
        let mut names: Vec<_> = choices[1]["named"].as_array().unwrap().iter().map(|t| &t[0]).collect();
        names.sort_by_key(|name| name.as_str());
        assert_eq!(names, ["direct", "recursive_halving", "ring"]);
        assert!(choices[1]["auto_us"].as_f64() > Some(0.0), "{series}");
    }
    let output = perf(&["pingpong", "-N", "2", "--check-tuning"]);
    assert!(!output.status.success() && text(&output.stderr).contains("no algorithm is chosen"));
}

#[test]
fn perf_checks_every_collective() {
    let all = [
        "all_reduce",
        "reduce",
        "broadcast",
        "all_gather",
        "reduce_scatter",
        "all_to_all",
        "gather",
        "scatter",
        "scan",
        "exscan",
        "send_recv",
        "pingpong",
    ];
    for (i, what) in all.into_iter().enumerate() {
        let place: &[&str] = if i % 2 == 0 { &["--threads"] } else { &["--await"] };
        let root = if what == "pingpong" { "0" } else { "2" };
        let sizes =
            ["-N", "3", "-b", "1", "-e", "3000", "-f", "50", "-n", "2", "-w", "0", "-r", root, "-d", "bf16"];
        let output = perf(&[&[what], &sizes[..], place].concat());
        let said = text(&output.stdout);
        assert!(output.status.success(), "{what}: {said}{}", text(&output.stderr));
        assert!(said.contains("# Out of bounds values : 0 OK"), "{what}: {said}");
    }
}

#[test]
fn perf_checks_types_reductions_and_memory() {
    let combined = [
        ("f32", "avg"),
        ("f16", "prod"),
        ("f64", "min"),
        ("f8e4m3", "sum"),
        ("f8e5m2", "max"),
        ("i8", "sum"),
        ("u16", "avg"),
        ("i64", "prod"),
        ("u32", "bor"),
        ("bool", "sum"),
        ("bool", "bxor"),
    ];
    for (dtype, op) in combined {
        let sizes = ["all_reduce", "-N", "4", "--threads", "-b", "2K", "-e", "2K", "-n", "1", "-w", "0"];
        // The arena cannot hold bools: other ranks write it, and not every byte is a bool.
        let memory = if dtype == "bool" { "user" } else { "arena" };
        let output = perf(&[&sizes[..], &["-d", dtype, "-o", op, "--alloc", memory]].concat());
        let said = text(&output.stdout);
        assert!(output.status.success(), "{dtype} {op}: {said}{}", text(&output.stderr));
        assert!(said.contains("# Out of bounds values : 0 OK"), "{dtype} {op}: {said}");
    }
}

#[test]
fn perf_refuses_what_makes_no_sense() {
    let refused: [(&[&str], &str); 10] = [
        (&["allreduce"], "all_reduce"),
        (&["all_reduce", "-b", "1M", "-e", "1K"], "-b 1048576 is more than -e 1024"),
        (&["all_reduce", "-f", "1"], "a factor above 1"),
        (&["all_reduce", "-i", "0"], "at least one byte"),
        (&["all_reduce", "--sizes", "4,1K", "-e", "1K"], "cannot be used with"),
        (&["all_reduce", "-d", "f32", "-o", "bor"], "bor is not defined on f32"),
        (&["all_reduce", "-d", "bool", "--alloc", "arena"], "not every byte is a bool"),
        (&["broadcast", "-N", "2", "-r", "2"], "roots are 0..=1"),
        (&["all_reduce", "--threads", "--link", "tcp"], "--threads"),
        (&["pingpong", "-N", "1"], "two ranks"),
    ];
    for (arguments, expected) in refused {
        let output = perf(arguments);
        let said = text(&output.stderr);
        assert!(!output.status.success() && said.contains(expected), "{arguments:?}: {said}");
    }
    // No algorithm has this name: the command refuses it before any rank starts.
    let output = perf(&["broadcast", "-N", "2", "-e", "4", "--algo", "halving"]);
    assert!(!output.status.success() && text(&output.stderr).contains("halving"), "{}", text(&output.stderr));
}

#[test]
fn perf_binds_its_ranks_to_cores_where_they_fit_and_not_where_it_is_told_otherwise() {
    let cores = std::thread::available_parallelism().unwrap().get();
    let said = |arguments: &[&str]| {
        let sizes = ["all_reduce", "--sizes", "4", "-n", "1", "-w", "0", "-c", "0"];
        let output = perf(&[&sizes[..], arguments].concat());
        assert!(output.status.success(), "{arguments:?}: {}", text(&output.stderr));
        text(&output.stdout)
    };
    let bound = "each bound to its share of the cores";
    // One rank always fits. Half as many ranks as processors fit even if two processors are one core.
    assert!(said(&["-N", "1"]).contains(&format!("1 processes on {cores} cores, {bound}")));
    let half = (cores / 2).max(1).to_string();
    assert!(said(&["-N", &half]).contains(bound));
    for free in [&["-N", "1", "--bind-to", "none"][..], &["--bind-to", "none"], &["--threads"]] {
        assert!(!said(free).contains("bound to"), "{free:?}");
    }
    assert!(!said(&["-N", &(cores + 1).to_string()]).contains("bound to"), "ranks that outnumber cores");
    assert!(said(&["-N", "1", "--bind-to", "numa"]).contains("share of the NUMA nodes"));
    // Under a launcher, binding is the launcher's: perf says nothing of it, and refuses `--bind-to`.
    let script = format!("'{}' perf all_reduce -e 4 -n 1 -w 0", env!("CARGO_BIN_EXE_allstream"));
    let output = run(&["-n", "1"], &script);
    assert!(output.status.success() && !text(&output.stdout).contains("bound to"), "{output:?}");
    let output = run(&["-n", "1"], &format!("{script} --bind-to core"));
    let said = text(&output.stderr);
    assert!(!output.status.success() && said.contains("allstream run --bind-to core"), "{said}");
}

#[test]
fn perf_is_a_rank_under_a_launcher() {
    let script = format!("'{}' perf all_reduce -b 4 -e 64 -n 2 -w 0", env!("CARGO_BIN_EXE_allstream"));
    let output = run(&["-n", "3"], &script);
    let said = text(&output.stdout);
    assert!(output.status.success() && said.contains("3 processes"), "{said}{}", text(&output.stderr));
    assert_eq!(said.matches("# Avg bus bandwidth").count(), 1, "rank 0 alone prints: {said}");
}

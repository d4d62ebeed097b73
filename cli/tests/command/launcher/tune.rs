//! `allstream tune`: the command writes and prints what it measures, and algorithms are chosen by that table.

use serde_json::Value;

use super::*;

fn with_table(arguments: &[&str], table: &str) -> Output {
    allstream(arguments, &[("ALLSTREAM_TUNING", table)])
}

#[test]
fn tune_measures_and_predicts_and_adds_to_what_is_there() {
    let scratch = Scratch::new();
    let path = scratch.0.join("made").join("tuning.json");
    let file = path.to_str().unwrap();
    let sizes = ["--collectives", "all_gather", "--sizes", "4,2K", "-o", file];
    for (link, ranks) in [("shm", "2"), ("inproc", "3")] {
        let output = with_table(&[&["tune", "-N", ranks, "--link", link], &sizes[..]].concat(), "off");
        assert!(output.status.success(), "{}{}", text(&output.stdout), text(&output.stderr));
    }
    let table = json(&path);
    let figures: Vec<_> =
        table["figures"].as_array().unwrap().iter().map(|f| (&f["link"], &f["ranks"])).collect();
    assert_eq!(figures, [(&"inproc".into(), &3.into()), (&"shm".into(), &2.into())]);
    let rows = table["rows"].as_array().unwrap();
    let find = |link: &str, kind: &str, ranks: u64| {
        let here = |row: &&Value| row["link"] == link && row["collective"] == kind && row["ranks"] == ranks;
        rows.iter().filter(here).collect::<Vec<_>>()
    };
    // Every table has all_reduce: the figures of links come from its times.
    for kind in ["all_reduce", "all_gather"] {
        let measured = find("shm", kind, 2);
        assert_eq!(measured.len(), 2, "two sizes: {rows:?}");
        for row in measured {
            let algos = |what: &str| {
                let mut algos: Vec<_> =
                    row[what].as_array().unwrap().iter().map(|t| t["algo"].to_string()).collect();
                algos.sort();
                algos
            };
            assert!(algos("measured").len() >= 3 && algos("measured") == algos("predicted"), "{row}");
        }
        let other = find("inproc", kind, 8);
        assert!(
            other.iter().all(|row| row["measured"] == Value::Array(vec![])) && other.len() == 2,
            "{other:?}"
        );
    }
    let info = with_table(&["info", "--tuning"], file);
    let said = text(&info.stdout);
    assert!(info.status.success() && said.contains(file), "{said}{}", text(&info.stderr));
    assert!(said.lines().any(|l| l.starts_with("  shm     all_gather")), "{said}");
}

#[test]
fn a_table_that_is_named_must_be_there_and_one_that_is_off_is_not_used() {
    let scratch = Scratch::new();
    let path = scratch.0.join("tuning.json");
    let perf = ["perf", "all_reduce", "--threads", "--sizes", "4", "-n", "2", "-w", "0"];
    let missing = with_table(&perf, path.to_str().unwrap());
    let said = text(&missing.stderr);
    assert!(
        !missing.status.success() && said.contains("tuning.json") && said.contains("allstream tune"),
        "{said}"
    );
    fs::write(&path, "{\"format\": 1,").unwrap();
    let broken = with_table(&perf, path.to_str().unwrap());
    assert!(
        !broken.status.success() && text(&broken.stderr).contains("tuning.json"),
        "{}",
        text(&broken.stderr)
    );
    assert!(with_table(&perf, "off").status.success());
    // If a table is good, the log says that it is used, and who made it.
    fs::write(&path, r#"{"format": 1, "made": "by a test", "figures": [], "rows": []}"#).unwrap();
    let info = ("ALLSTREAM_LOG", "info");
    let used = allstream(&perf, &[("ALLSTREAM_TUNING", path.to_str().unwrap()), info]);
    let said = text(&used.stderr);
    assert!(used.status.success() && said.contains("tuning.json: by a test"), "{said}");
    // If no variable names a table, the one in the cache folder is used. If that one is broken, it is passed over.
    let cached = scratch.0.join("allstream").join("tuning.json");
    fs::create_dir_all(cached.parent().unwrap()).unwrap();
    for (table, says) in [
        ("{\"format\": 9}", "is not used"),
        (r#"{"format": 1, "made": "by a test", "figures": [], "rows": []}"#, "by a test"),
    ] {
        fs::write(&cached, table).unwrap();
        let folder = ("XDG_CACHE_HOME", scratch.0.to_str().unwrap());
        let used = allstream(&perf, &[("ALLSTREAM_TUNING", ""), folder, info]);
        let said = text(&used.stderr);
        assert!(used.status.success() && said.contains(says), "{said}");
    }
    let info = with_table(&["info", "--tuning"], "off");
    assert!(info.status.success() && text(&info.stdout).contains("no table"), "{}", text(&info.stdout));
}

#[test]
fn tune_says_what_it_cannot_do() {
    for (arguments, says) in [
        (&["tune", "-N", "1"][..], "nobody to be measured with"),
        (&["tune", "--collectives", "sum"], "all_gather"),
        (&["tune", "--link", "roce"], "shm"),
    ] {
        let output = with_table(arguments, "off");
        assert!(!output.status.success() && text(&output.stderr).contains(says), "{}", text(&output.stderr));
    }
}

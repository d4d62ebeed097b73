use super::*;
use crate::plan::choices::GroupChoices;

fn time(algo: Algo, us: f64) -> TimeBy {
    TimeBy { algo, us }
}

fn group(link: LinkClass, ranks: usize) -> GroupShape {
    GroupShape { link, hosts: 1, ranks }
}

/// The table's choices for a group that every algorithm suits.
fn of(table: &Table, link: LinkClass, ranks: usize) -> GroupChoices {
    table.choices().of_group(group(link, ranks), |_, _| true)
}

fn row(ranks: usize, bytes: u64, predicted: &[TimeBy], measured: &[TimeBy]) -> Row {
    Row {
        group: group(LinkClass::SHM, ranks),
        collective: Kind::AllReduce,
        bytes,
        predicted: predicted.to_vec(),
        measured: measured.to_vec(),
    }
}

fn table(rows: Vec<Row>) -> Table {
    Table { format: FORMAT, made: "by a test".into(), figures: vec![figures(LinkClass::SHM)], rows }
}

fn figures(link: LinkClass) -> Figures {
    Figures { group: group(link, 2), cores: 2, latency_us: 0.5, frame_us: 0.2, bandwidth: 10e9, memory: 40e9 }
}

#[test]
fn sizes_between_two_rows_are_the_nearer_ones_and_far_ones_nobodys() {
    let (ring, direct) = ([time(Algo::Ring, 1.0)], [time(Algo::Direct, 1.0)]);
    let table = table(vec![row(2, 1024, &[], &ring), row(2, 1 << 20, &[], &direct)]);
    let group = of(&table, LinkClass::SHM, 2);
    let at = |bytes| group.choose(Kind::AllReduce, bytes);
    // The middle of 1 KB and 1 MB, by ratio, is 32 KB.
    assert_eq!([256, 1024, 32 << 10].map(at), [Some(Algo::Ring); 3]);
    assert_eq!([(32 << 10) + 1, 4 << 20].map(at), [Some(Algo::Direct); 2]);
    assert_eq!([0, 4, 255, (4 << 20) + 1, 1 << 40].map(at), [None; 5]);
    assert_eq!(group.choose(Kind::Broadcast, 1024), None, "nothing is known of it");
}

#[test]
fn blocks_are_counted_as_the_rules_count_them() {
    let gather = |bytes, algo| Row { collective: Kind::AllGather, ..row(4, bytes, &[], &[time(algo, 1.0)]) };
    let table = table(vec![gather(4096, Algo::Ring), gather(4 << 20, Algo::RecursiveDoubling)]);
    let group = of(&table, LinkClass::SHM, 4);
    // The middle of 4 KB and 4 MB, by ratio, is 128 KB: four blocks of 32 KB.
    assert_eq!(group.choose(Kind::AllGather, 32 << 10), Some(Algo::Ring));
    assert_eq!(group.choose(Kind::AllGather, 33 << 10), Some(Algo::RecursiveDoubling));
}

#[test]
fn a_group_is_chosen_for_by_one_of_nearly_its_size_on_its_links_and_hosts() {
    let rows = [2, 4, 5].map(|ranks| row(ranks, 64, &[], &[time(Algo::ALL[ranks], 1.0)]));
    let mut table = table(rows.to_vec());
    table.rows.push(Row {
        group: GroupShape { hosts: 2, ..group(LinkClass::TCP, 4) },
        ..row(4, 64, &[], &[time(Algo::Ring, 1.0)])
    });
    let at = |link, ranks| of(&table, link, ranks).choose(Kind::AllReduce, 64);
    assert_eq!(
        [3, 4, 9].map(|ranks| at(LinkClass::SHM, ranks)),
        [2, 4, 5].map(|ranks| Some(Algo::ALL[ranks]))
    );
    assert_eq!(at(LinkClass::SHM, 10), None, "5 ranks say nothing of 10");
    assert_eq!((at(LinkClass::TCP, 4), at(LinkClass::INPROC, 4)), (None, None), "of one host");
    let choices = table.choices();
    let hosts = |hosts| {
        let group = GroupShape { hosts, ..group(LinkClass::TCP, 4) };
        choices.of_group(group, |_, _| true).choose(Kind::AllReduce, 64)
    };
    assert_eq!([1, 2, 3].map(hosts), [None, Some(Algo::Ring), None]);
    // An algorithm that does not suit the group is not chosen.
    assert_eq!(choices.of_group(group(LinkClass::SHM, 4), |_, _| false).choose(Kind::AllReduce, 64), None);
    let small = choices.clone().up_to(3);
    let at = |ranks| small.of_group(group(LinkClass::SHM, ranks), |_, _| true).choose(Kind::AllReduce, 64);
    assert_eq!((at(3), at(5)), (Some(Algo::ALL[2]), None));
    assert!(choices.up_to(1).is_empty());
}

#[test]
fn the_fastest_comes_first_and_nonsense_not_at_all() {
    let times =
        [time(Algo::Ring, 3.0), time(Algo::Mst, f64::NAN), time(Algo::Direct, 2.0), time(Algo::Naive, 0.0)];
    let table = table(vec![row(2, 64, &[], &times)]);
    let algos: Vec<_> = table.times(&table.rows[0]).iter().map(|time| time.algo).collect();
    assert_eq!(algos, [Algo::Direct, Algo::Ring]);
}

/// For 64 bytes the rules choose `OneShot`.
#[test]
fn a_little_faster_is_no_reason_to_leave_the_rules() {
    let chosen = |oneshot, ring| {
        let table = table(vec![row(2, 64, &[], &[time(Algo::Ring, ring), time(Algo::OneShot, oneshot)])]);
        let predicted = Table {
            rows: table
                .rows
                .iter()
                .map(|row| Row { predicted: row.measured.clone(), measured: Vec::new(), ..row.clone() })
                .collect(),
            ..table.clone()
        };
        [table, predicted].map(|table| of(&table, LinkClass::SHM, 2).choose(Kind::AllReduce, 64).unwrap())
    };
    assert_eq!(chosen(1.1, 1.0), [Algo::OneShot; 2]);
    assert_eq!(chosen(1.2, 1.0), [Algo::Ring, Algo::OneShot]);
    assert_eq!(chosen(2.2, 1.0), [Algo::Ring; 2]);
    assert_eq!(chosen(1.0, 1.1), [Algo::OneShot; 2]);
}

/// If the prediction for an algorithm is wrong by a factor, the prediction for one more rank is corrected by the same factor.
#[test]
fn predictions_are_corrected_by_what_was_measured() {
    let predicted = [time(Algo::Ring, 10.0), time(Algo::Direct, 20.0)];
    let measured = [time(Algo::Ring, 60.0), time(Algo::Direct, 20.0)];
    let table = table(vec![
        row(2, 64, &predicted, &measured),
        row(3, 64, &predicted, &[]),
        row(3, 60, &predicted, &[]),
        row(3, 1 << 20, &predicted, &[]),
    ]);
    assert_eq!(table.times(&table.rows[1]), [time(Algo::Direct, 20.0), time(Algo::Ring, 60.0)]);
    assert_eq!(table.times(&table.rows[2]), table.times(&table.rows[1]), "of nearly the size");
    assert_eq!(table.times(&table.rows[3])[0], time(Algo::Ring, 10.0), "of a size that is far from any");
}

#[test]
fn a_newer_table_replaces_and_keeps_what_it_has_not_measured() {
    let (old, new) = ([time(Algo::Ring, 1.0)], [time(Algo::Direct, 2.0)]);
    let mut all = table(vec![row(2, 64, &[], &old), row(4, 64, &[], &old)]);
    all.merge(table(vec![row(2, 64, &[], &new), row(4, 64, &new, &[]), row(8, 64, &new, &[])]));
    let first: Vec<_> = all.rows.iter().map(|row| (row.group.ranks, all.times(row)[0])).collect();
    assert_eq!(first, [(2, new[0]), (4, old[0]), (8, new[0])]);
    assert_eq!(all.figures.len(), 1);
}

#[test]
fn files_come_back_and_what_is_none_is_refused_with_its_name() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("deeper").join("tuning.json");
    let error = Table::read(&path).unwrap_err().to_string();
    assert!(error.contains("tuning.json") && error.contains("no such file"), "{error}");
    let written = table(vec![row(2, 64, &[time(Algo::Ring, 1.5)], &[time(Algo::Direct, 2.5)])]);
    written.write(&path).unwrap();
    assert_eq!(Table::read(&path).unwrap(), written);
    assert!(std::fs::read_to_string(&path).unwrap().contains("\"all_reduce\""), "names, not numbers");
    for (text, says) in [
        ("{", "EOF"),
        (r#"{"format": 7, "figures": [], "rows": []}"#, "format is 7"),
        (
            r#"{"format": 1, "figures": [], "rows": [{"link": "shm", "hosts": 1, "ranks": 2, "collective": "nothing", "bytes": 1}]}"#,
            "all_gather",
        ),
    ] {
        std::fs::write(&path, text).unwrap();
        let error = Table::read(&path).unwrap_err().to_string();
        assert!(error.contains("tuning.json") && error.contains(says), "{error}");
    }
    // A file that is longer than any table, or that has no end, is not read at all.
    std::fs::File::create(&path).unwrap().set_len(LONGEST + 1).unwrap();
    for path in [&*path, Path::new("/dev/zero")] {
        assert!(Table::read(path).unwrap_err().to_string().contains("at most"));
    }
    let rows = (0..60_000).map(|bytes| row(2, bytes, &[time(Algo::Ring, 1.0)], &[])).collect();
    assert!(table(rows).write(&path).unwrap_err().to_string().contains("fewer sizes"));
}

/// The choices that a rank gets from rank 0 may name collectives and algorithms that the rank does not know.
#[test]
fn unknown_numbers_choose_nothing() {
    let hostile = r#"[{"link":"shm","hosts":1,"ranks":2,"kind":200,"steps":[]},
        {"link":"shm","hosts":1,"ranks":2,"kind":1,"steps":[{"upto":10,"algo":255},{"upto":3,"algo":3},{"upto":20,"algo":0}]}]"#;
    let choices: Choices = serde_json::from_str(hostile).unwrap();
    let group = choices.of_group(group(LinkClass::SHM, 2), |_, _| true);
    assert_eq!([4, 11, 21].map(|bytes| group.choose(Kind::AllReduce, bytes)), [None; 3]);
}

package mirror

import (
	"context"
	"errors"

	"github.com/ashlar-csi/ashlar/pkg/blockdev/dm"
)

// tail is the size of the part in memory that a mirror has behind the volume's bytes, for what it says of the mirror. What is over the mirror ends before it.
const tail = 4096

// tailed calls bring with a table of line and a tail, which takes flushes, and no discards, and has the logical sectors of the mirror of a name, if that is there
// already. The kernel decides for each device when its table takes effect which of these it has, and what is over a mirror keeps what it was told when it was
// made.
//
// Flushes go to a device if one part of its table takes them. A leg that joins later may have a volatile cache, even if no present leg has one.
//
// Discards go to a device if all of its parts take them. A leg may not do all of a discard, and says nothing of that: a thin pool gives back whole chunks, and
// keeps the bytes around them; a file reads as zeros. Reads of the discarded part would depend on the leg. Before Linux 5.19 the kernel passes them on all the
// same, if all legs take them.
//
// Sectors are as large as those of any part. When the leg with the largest ones leaves, they stay: else it could not come back (checkSectors).
func tailed(ctx context.Context, name string, line dm.Line, bring func(table []dm.Line) error) error {
	sectors, err := sectorsOf(name)
	if err != nil {
		return err
	}
	held, number, err := inMemory(ctx, make([]byte, tail), sectors)
	if err != nil {
		return err
	}
	err = bring([]dm.Line{line, {Start: line.Length, Length: tail, Kind: "linear", Text: dm.Number(number) + " 0"}})
	return errors.Join(err, held.Close()) // it goes with the table
}

// failing calls bring with a table by which all I/O fails. A device over nothing takes no flushes: the kernel would acknowledge them at once, and a user
// would take for durable what the legs may have lost. So if the kernel has the module dm-flakey, the table has a part at its end that takes flushes and
// fails them.
func failing(ctx context.Context, size int64, bring func(table []dm.Line) error) error {
	table := []dm.Line{{Length: size, Kind: ended}}
	if dm.HasTarget(fails) != nil {
		return bring(table)
	}
	held, number, err := inMemory(ctx, make([]byte, tail), 0)
	if err != nil {
		return err
	}
	err = bring(append(table, dm.Line{Start: size, Length: tail, Kind: fails, Text: dm.Number(number) + " 0 0 1"})) // always down
	return errors.Join(err, held.Close())
}

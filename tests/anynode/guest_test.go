package anynode

import (
	"context"
	"encoding/gob"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/rpc"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/ashlar-csi/ashlar/internal/co"
	"github.com/ashlar-csi/ashlar/internal/process"
)

// machineName is the variable that says which machine of a test this program runs in.
const machineName = "ASHLAR_MACHINE"

// The ports of a machine at which the test asks for something, and for writers.
const (
	asksPort   = "9000"
	writesPort = "9001"
)

// Guest does in a machine what the test asks for. Its methods are called over the network (net/rpc).
type Guest struct{ driver *process.Driver }

// inMachine starts the driver, and serves the test. What the driver says outlives the machine.
func inMachine(name string, argv []string) error {
	const dir = "/run/driver"
	if err := errors.Join(os.Mkdir(dir, 0o700), os.Symlink("/run/machine/driver.log", filepath.Join(dir, "log"))); err != nil {
		return err
	}
	driver, err := process.New(dir, "", argv...)
	if err != nil {
		return err
	}
	driver.Node = name
	if err := driver.Start(); err != nil {
		return err
	}
	server := rpc.NewServer()
	if err := server.Register(&Guest{driver}); err != nil {
		return err
	}
	asks, err := net.Listen("tcp", ":"+asksPort)
	if err != nil {
		return err
	}
	go server.Accept(asks)
	writes, err := net.Listen("tcp", ":"+writesPort)
	if err != nil {
		return err
	}
	for {
		conn, err := writes.Accept()
		if err != nil {
			return err
		}
		go writeFor(conn)
	}
}

// Used is a volume.
type Used struct{ ID, Name, Filesystem string }

func (g *Guest) volume(u Used) *co.Volume {
	return g.driver.Volume(u.ID, u.Name, co.Capability(u.Filesystem, co.MultiWriter))
}

// callTime is how long a call to the driver may take, as that of a kubelet.
const callTime = 15 * time.Second

// Up stages and publishes a volume, and says where the bytes are: a device, or a file in its filesystem.
func (g *Guest) Up(u Used, path *string) error {
	ctx, cancel := context.WithTimeout(context.Background(), callTime)
	defer cancel()
	v := g.volume(u)
	target := v.Target("pod")
	*path = v.File(target)
	return co.InTurn(func() error { return v.Stage(ctx) }, func() error { return v.Publish(ctx, target, false) })
}

// Down undoes Up.
func (g *Guest) Down(u Used, _ *bool) error {
	ctx, cancel := context.WithTimeout(context.Background(), callTime)
	defer cancel()
	v := g.volume(u)
	return co.InTurn(func() error { return v.Unpublish(ctx, v.Target("pod")) }, func() error { return v.Unstage(ctx) })
}

// Ready waits until the driver is.
func (g *Guest) Ready(bool, *bool) error {
	ctx, cancel := context.WithTimeout(context.Background(), callTime)
	defer cancel()
	return g.driver.Ready(ctx)
}

// Read returns what the blocks at a path have: tags and numbers.
func (g *Guest) Read(path string, have *[][2]uint64) error {
	all, err := read(path)
	for _, one := range all {
		*have = append(*have, [2]uint64{one.tag, one.n})
	}
	return err
}

// Run runs a program, and returns what it says.
func (g *Guest) Run(argv []string, said *string) error {
	out, err := exec.Command(argv[0], argv[1:]...).CombinedOutput()
	*said = string(out)
	if err != nil {
		return fmt.Errorf("%s: %w: %s", strings.Join(argv, " "), err, out)
	}
	return nil
}

// Left is what kernel and pool have of volumes.
func (g *Guest) Left(_ bool, all *[]string) error {
	files, err := filepath.Glob(poolInMachine + "/volumes/*")
	*all = slices.Concat(files, devices())
	return err
}

// poolInMachine is the directory of a machine's pool.
const poolInMachine = "/run/disk/pool"

// toWrite is what a writer in a machine is to do.
type toWrite struct {
	Path    string
	Tag     uint64
	Flushes bool // now and then, a device; else each write is through when it is done
}

// written is how far it is.
type written struct {
	Began, Acked uint64
	Ended        bool
	Err          string
}

// writeFor has a writer write for the other end of a connection, which hears how far it is, until it says something.
func writeFor(conn net.Conn) {
	defer conn.Close()
	var what toWrite
	if gob.NewDecoder(conn).Decode(&what) != nil {
		return
	}
	out := gob.NewEncoder(conn)
	w, err := what.start()
	if err != nil {
		_ = out.Encode(written{Ended: true, Err: err.Error()}) // the other end may be gone
		return
	}
	go func() {
		_, _ = conn.Read(make([]byte, 1)) // also if the other end is gone
		w.stop.Store(true)
	}()
	for now := (written{}); !now.Ended; {
		select {
		case <-w.done:
			if now.Ended = true; w.err != nil {
				now.Err = w.err.Error()
			}
		case <-time.After(time.Millisecond):
		}
		now.Acked = w.acked.Load()
		now.Began = w.began.Load()
		if out.Encode(now) != nil {
			return
		}
	}
}

// start starts the writer. In a filesystem it writes as most programs do; the file that it needs is made if it is not there.
func (what toWrite) start() (*writer, error) {
	info, err := os.Stat(what.Path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		if err := os.WriteFile(what.Path, make([]byte, blocks*block), 0o600); err != nil {
			return nil, err
		}
	case err != nil:
		return nil, err
	case !info.Mode().IsRegular() && what.Flushes:
		return writeFlushed(what.Path, what.Tag)
	case !info.Mode().IsRegular():
		return write(what.Path, what.Tag)
	}
	return writeCached(what.Path, what.Tag)
}

package volume

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"

	"k8s.io/klog/v2"

	"github.com/ashlar-csi/ashlar/internal/keylock"
	"github.com/ashlar-csi/ashlar/internal/secret"
	"github.com/ashlar-csi/ashlar/internal/trace"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/nvmet"
	"github.com/ashlar-csi/ashlar/pkg/device"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// A volume of this node, its home, may be used by another one, its consumer (docs/decisions/any-node.md). What is exported is the lower
// part of its stack: the pool's device and the top, never what is behind a header of encryption, for which the key is on the consumer alone.
//
// The record says to whom (labelExport), before anything is exported and until all of it has ended. So at most one node can write:
// a volume that is attached here is not exported, one that is exported is not attached here before that has ended, and to
// another node it is exported only when the export before has ended.
//
// As for all of Local, the caller serialises the calls for a volume, by its lock (keylock.Volume) in the table that CSI calls and the
// agent take theirs from. Who asks in the name of another node takes it too.

// Grant is to whom a volume is exported: a node, for one generation of its claim.
type Grant struct {
	Generation int64
	Node       string
}

func (g Grant) String() string { return fmt.Sprintf("node %s (generation %d)", g.Node, g.Generation) }

// Exported is all that a consumer needs to use a volume. It prints without the secrets.
type Exported struct {
	Grant
	NQN    string      // of the subsystem
	Host   string      // NQN that the consumer has to have
	Secret secret.Text // of the consumer, for DH-HMAC-CHAP; empty: none is asked for
	PSK    secret.Text // of both, for TLS; empty: all goes in plain text
	UUID   string      // of the namespace; its NGUID has the same bytes
	Size   int64       // bytes of the device
	Record blockdev.Record
	// Otherwise is for one that is exported since before this node was to do so with TLS, or without, and is as it was: it stays so until it ends, for who is connected.
	Otherwise bool
}

// GoString is for %#v.
func (e Exported) GoString() string { return e.String() }

// Exporter gives devices to other nodes: nvmet.Target, of which see what each of them does.
type Exporter interface {
	Authenticates() bool
	// Add: what has to be there when a machine starts belongs into one call.
	Add(ctx context.Context, exports ...nvmet.Export) error
	// Remove is the fence: when it has returned without an error, nothing of the consumer comes any more.
	Remove(ctx context.Context, nqn string) error
	Resized(ctx context.Context, nqn string) error
	// Exports are all that there are, whoever made them.
	Exports(ctx context.Context) ([]nvmet.Export, error)
}

// Consumers are the nodes that volumes of this one are exported to, as it reaches them. ErrUnavailable for one that does not answer.
type Consumers interface {
	Holder
	// Modified has a consumer set all mutable parameters of a volume (Local.Modified). With an error nothing has changed there.
	Modified(ctx context.Context, id ID, to Grant, mutable map[string]string) error
}

// Holder holds back the writes of the consumers of volumes.
type Holder interface {
	// Hold has a consumer write out what it holds of a volume, and hold back its writes until release is called, as Local.Hold there does.
	// If ctx ends first, or nobody can be asked any more, they go on by themselves. ErrUnavailable from release: they were not held back until then.
	// release is nil where nothing is held back.
	Hold(ctx context.Context, id ID, to Grant) (release func() error, err error)
}

// Exporting is what a node needs to export volumes.
type Exporting struct {
	// Open is asked for the exporter when it is needed, until it is there. Nil for a node that gives nothing to others: with Boot alone it ends what has ended with an earlier start of
	// the machine.
	Open func() (Exporter, error)
	// Key is the node's own, of 32 random bytes, the same at each start: the names and secrets of consumers follow from it, and so are in
	// no record. Records get about: lvm2 shows them to all its tools, archives and support bundles.
	Key []byte
	// TLS is whether all that is exported goes over TLS. What was exported without it before goes on as it is until it ends.
	TLS bool
	// Boot is the word of this start of the machine: another start has another one. What was exported before it does not go on.
	Boot string
	// Consumers may be nil: no copy is made then of a volume that is exported, and its parameters stay.
	Consumers Consumers
	// Locks are those of the volumes: see keylock.Volume.
	Locks *keylock.Table
}

// place is where a record of a volume is: beside the volume itself another pool may have what is left of it, which may be exported too.
type place struct {
	id   ID
	pool string
}

// exports is what a Local has of its exports beside the records.
type exports struct {
	starting sync.Mutex // held while those of a pool are made again

	mu     sync.Mutex
	how    *Exporting // nil: nothing is exported
	opened Exporter   // nil until it was needed
	failed map[place]error
	given  map[ID]map[string]string // what this process exported, or found exported for reading, and has not begun to end: the names, and those of the hosts
}

// notServing is why a node exports nothing.
const notServing = "its driver was started without --remote-address, or cannot use that, as its log says"

// exporting is how the node exports volumes: nothing, if Open is nil. is: it was told.
func (l *Local) exporting() (how Exporting, is bool) {
	l.exports.mu.Lock()
	defer l.exports.mu.Unlock()
	if l.exports.how == nil {
		return Exporting{}, false
	}
	return *l.exports.how, true
}

// exporter returns what exports; ErrUnavailable without, and how the node exports all the same, as far as it was told.
func (l *Local) exporter() (Exporter, Exporting, error) {
	how, _ := l.exporting()
	if how.Open == nil {
		return nil, how, fmt.Errorf("%w: node %s gives nothing to other nodes: %s", errdefs.ErrUnavailable, l.node, notServing)
	}
	x := &l.exports
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.opened == nil {
		opened, err := how.Open()
		if err != nil {
			return nil, how, err
		}
		x.opened = opened
	}
	return x.opened, how, nil
}

// earlier reports whether something is of an earlier start of the machine, by the word of its own: whatever the kernel had of it went with that.
func (how Exporting) earlier(boot string) bool { return how.Boot != "" && boot != how.Boot }

// consumers returns those who reach consumers; nil if there are none.
func (l *Local) consumers() Consumers {
	how, _ := l.exporting()
	return how.Consumers
}

// setFailed notes how it stands with an export that should be there, and reports whether it had failed before.
func (l *Local) setFailed(at place, err error) (before bool) {
	l.exports.mu.Lock()
	defer l.exports.mu.Unlock()
	before = l.exports.failed[at] != nil
	if err == nil {
		delete(l.exports.failed, at)
	} else {
		l.exports.failed[at] = err
	}
	return before
}

// setGiven notes that a volume is exported by a name to a host.
func (l *Local) setGiven(id ID, nqn, host string) {
	l.exports.mu.Lock()
	defer l.exports.mu.Unlock()
	if l.exports.given[id] == nil {
		l.exports.given[id] = map[string]string{}
	}
	l.exports.given[id][nqn] = host
}

// ending notes that what a record says is exported by some names begins to end: nothing exports it again.
func (l *Local) ending(at place, nqns ...string) {
	l.exports.mu.Lock()
	defer l.exports.mu.Unlock()
	delete(l.exports.failed, at)
	for _, nqn := range nqns {
		delete(l.exports.given[at.id], nqn)
	}
	if len(l.exports.given[at.id]) == 0 {
		delete(l.exports.given, at.id)
	}
}

// endingAll is ending of all that is exported of a volume, whatever record says so.
func (l *Local) endingAll(id ID) {
	l.exports.mu.Lock()
	defer l.exports.mu.Unlock()
	maps.DeleteFunc(l.exports.failed, func(at place, _ error) bool { return at.id == id })
	delete(l.exports.given, id)
}

// givenOf are the names by which a volume is exported, as far as this process knows, with those of the hosts.
func (l *Local) givenOf(id ID) map[string]string {
	l.exports.mu.Lock()
	defer l.exports.mu.Unlock()
	return maps.Clone(l.exports.given[id])
}

// failure is why what a record says is exported is not; nil if it is, or is about to end.
func (l *Local) failure(at place) error {
	l.exports.mu.Lock()
	defer l.exports.mu.Unlock()
	return l.exports.failed[at]
}

// ExportOf says to whom a volume is exported, by its record; false if to nobody.
func (l *Local) ExportOf(ctx context.Context, id ID) (Grant, bool, error) {
	_, record, err := l.finishedRecord(ctx, id)
	if err != nil {
		return Grant{}, false, err
	}
	e, is, err := exportOf(record)
	return e.Grant, is, err
}

// Export exports a volume to a consumer, or finds that it is, also if that was cut short. An export to another one is ended first;
// ErrPrecondition if that has a later generation. ErrInUse while the volume is attached here. ErrUnavailable where nothing can be exported now.
func (l *Local) Export(ctx context.Context, id ID, to Grant) (_ Exported, err error) {
	if err := l.mayExport(id, to); err != nil {
		return Exported{}, err
	}
	_, how, err := l.exporter()
	if err != nil { // before anything changes
		return Exported{}, err
	}
	ctx, end := trace.Start(ctx, "export", "volume", id.String())
	defer func() { end(err) }()
	pool, record, err := l.finishedRecord(ctx, id)
	if err != nil {
		return Exported{}, err
	}
	e, is, err := exportOf(record)
	if err != nil {
		return Exported{}, err
	}
	if is && e.Generation > to.Generation {
		return Exported{}, fmt.Errorf("%w: volume %s is exported to %s, later than %s", errdefs.ErrPrecondition, id, e.Grant, to)
	}
	if is && e.Grant == to && e.boot == how.Boot {
		err = l.unsealUsed(ctx, pool, record) // whoever asks does not mirror it
	} else {
		if is {
			err = l.unexport(ctx, pool, record, e)
		}
		if err == nil {
			e = newExport(to, how.Boot)
			record, err = l.recordExport(ctx, pool, record, e)
		}
	}
	if err != nil {
		return Exported{}, err
	}
	return l.export(ctx, pool, record, e)
}

// recordExport has the record of a volume say that it is exported, once nobody else uses it.
func (l *Local) recordExport(ctx context.Context, pool blockdev.Pool, record blockdev.Record, e export) (blockdev.Record, error) {
	if err := l.endAllReading(ctx, IDOf(pool.Name(), record)); err != nil {
		return record, err
	}
	if err := l.unusedHere(ctx, pool, record.Ref); err != nil {
		return record, err
	}
	if err := l.unseal(ctx, pool, record); err != nil {
		return record, err
	}
	return pool.SetLabels(ctx, record.Ref, func(labels map[string]string) error {
		setLabel(labels, labelExport, e.label())
		return nil
	})
}

// mayExport is ErrInvalid for whom nothing can be exported to.
func (l *Local) mayExport(id ID, to Grant) error {
	if to.Generation <= 0 || !exportPattern.MatchString(export{to, "0123456789abcdef", "0"}.label()) || to.Node == l.node {
		return fmt.Errorf("%w: volume %s cannot be exported from node %s to %s", errdefs.ErrInvalid, id, l.node, to)
	}
	return nil
}

// unusedHere is ErrInUse while a volume is attached on this node, for whoever that is: also for a pod that has it still although its claim is
// gone. What is attached for reading is the driver's own, for a moment.
func (l *Local) unusedHere(ctx context.Context, pool blockdev.Pool, ref blockdev.Ref) error {
	devices, err := l.stacks.Of(pool, ref).Attached(ctx)
	if err != nil {
		return err
	}
	for _, d := range devices {
		if paths := l.mounts.Paths(d.Number); len(paths) > 0 {
			return fmt.Errorf("%w: volume %s is attached on its home node %s as %s, and mounted at %v; end the pods that use it there", errdefs.ErrInUse, ref.Key, l.node, d.Path, paths)
		}
		if !d.ReadOnly {
			return fmt.Errorf("%w: volume %s is attached on its home node %s as %s; end the pods that use it there", errdefs.ErrInUse, ref.Key, l.node, d.Path)
		}
	}
	return nil
}

// export brings about what the record of a volume says.
func (l *Local) export(ctx context.Context, pool blockdev.Pool, record blockdev.Record, e export) (out Exported, err error) {
	id := IDOf(pool.Name(), record)
	defer func() {
		if err != nil {
			err = fmt.Errorf("export volume %s to %s: %w", id, e.Grant, err)
		} else {
			l.setFailed(place{id, pool.Name()}, nil)
			l.setGiven(id, out.NQN, out.Host)
		}
	}()
	exporter, how, err := l.exporter()
	if err != nil {
		return Exported{}, err
	}
	out, attached, err := l.attachExport(ctx, pool, record, e)
	if err != nil {
		return Exported{}, err
	}
	defer func() { err = errors.Join(err, attached.Close()) }()
	return out.add(ctx, exporter, attached.Path, e.psk(how.Key, record.Key))
}

// attachExport attaches what is to be exported. The caller closes the device.
func (l *Local) attachExport(ctx context.Context, pool blockdev.Pool, record blockdev.Record, e export) (Exported, blockdev.Device, error) {
	exporter, how, err := l.exporter()
	if err != nil {
		return Exported{}, blockdev.Device{}, err
	}
	attached, err := l.layMarked(ctx, pool, record, device.Options{Keep: true}, func(o device.Options) (blockdev.Device, error) {
		return l.stacks.Of(pool, record.Ref).Attach(ctx, o)
	})
	if err != nil {
		return Exported{}, blockdev.Device{}, err
	}
	return e.exported(exporter, how, record, attached.Size), attached, nil
}

// exported is the export of a device of a size, as a consumer is to know it.
func (e export) exported(exporter Exporter, how Exporting, record blockdev.Record, size int64) Exported {
	out := Exported{Grant: e.Grant, NQN: e.nqn(record.Key), Host: e.host(how.Key, record.Key), UUID: e.uuid(record.Key), Size: size, Record: record}
	if exporter.Authenticates() {
		out.Secret = e.secret(how.Key, record.Key)
	}
	if how.TLS {
		out.PSK = e.psk(how.Key, record.Key)
	}
	return out
}

// add exports it, unless the exporter has it the other way, with TLS or without: then it is returned as it is there. psk is what it has with TLS.
func (e Exported) add(ctx context.Context, exporter Exporter, path string, psk secret.Text) (Exported, error) {
	err := exporter.Add(ctx, e.export(path))
	if !errors.Is(err, nvmet.ErrOtherwise) {
		return e, err
	}
	e.Otherwise = true
	if e.PSK == psk { // without, all else is there already; at an address of its own it would keep from there what is with TLS
		e.PSK = secret.Text{}
		return e, nil
	}
	e.PSK = psk
	return e, exporter.Add(ctx, e.export(path))
}

// export is it as the exporter takes it.
func (e Exported) export(path string) nvmet.Export {
	return nvmet.Export{NQN: e.NQN, Host: e.Host, UUID: e.UUID, Device: path, Secret: e.Secret, PSK: e.PSK}
}

// Unexport ends the export of a volume to a generation, or with 0 whichever there is. An export to another one stays. When it has returned
// without an error, nothing of the consumer comes any more, and the volume is attached nowhere. After an error it is to be called again:
// ErrInUse if somebody here holds the device that was exported. Of a volume that is missing, all that is exported still ends, and a node that exports nothing knows of nothing to end; so it does with 0 of one whose
// record is damaged. Where the record is good and does not say to whom, the kernel does: ErrDataLoss if it has an export of another generation.
func (l *Local) Unexport(ctx context.Context, id ID, generation int64) error {
	pool, record, err := l.anyRecord(ctx, id)
	if errors.Is(err, errdefs.ErrNotFound) || generation == 0 && errors.Is(err, errdefs.ErrDataLoss) {
		return l.unexportMissing(ctx, id)
	}
	if err != nil {
		return err
	}
	e, is, err := exportOf(record)
	if err != nil {
		return l.unexportUnread(ctx, pool, record, generation, err)
	}
	if !is || generation != 0 && e.Generation != generation {
		return nil
	}
	return trace.Do(ctx, "end an export", func(ctx context.Context) error { return l.unexport(ctx, pool, record, e) }, "volume", id.String())
}

// nobodys is a generation that no export has.
const nobodys = -1

// unexportUnread ends the export of a volume whose record does not say to whom it is, which is why: that is what the kernel exports of it.
func (l *Local) unexportUnread(ctx context.Context, pool blockdev.Pool, record blockdev.Record, generation int64, why error) error {
	id := IDOf(pool.Name(), record)
	exporter, _, err := l.exporter()
	if err != nil {
		return err
	}
	all, err := l.exportedOf(ctx, exporter, id)
	if err != nil {
		return err
	}
	for _, nqn := range all {
		if generation != 0 && !strings.HasPrefix(nqn, fmt.Sprintf("%s%s:%d:", nvmet.Prefix, id.Key, generation)) {
			return fmt.Errorf("end the export of volume %s of generation %d, while there is %s: %w", id, generation, nqn, why)
		}
	}
	klog.FromContext(ctx).Info("The record of a volume does not say to whom it is exported; ending all that the kernel exports of it", "volume", id.String(),
		"record", record.Labels[labelExport], "exports", all)
	if err := l.unexportMissing(ctx, id); err != nil {
		return err
	}
	if err := l.detach(ctx, l.stacks.Of(pool, record.Ref)); err != nil {
		return err
	}
	return changeLabel(ctx, pool, record.Ref, labelExport, "")
}

// exportedOf are the names of what the kernel exports of a volume, and of what it should: others may have taken that, and left parts.
func (l *Local) exportedOf(ctx context.Context, exporter Exporter, id ID) (nqns []string, err error) {
	all, err := exporter.Exports(ctx)
	for _, e := range all {
		if strings.HasPrefix(e.NQN, nvmet.Prefix+id.Key+":") {
			nqns = append(nqns, e.NQN)
		}
	}
	for nqn := range l.givenOf(id) {
		if !slices.Contains(nqns, nqn) {
			nqns = append(nqns, nqn)
		}
	}
	return nqns, err
}

// unexportMissing ends what is exported of a volume that has no record any more that could be read: only the kernel knows of it.
func (l *Local) unexportMissing(ctx context.Context, id ID) error {
	stack, err := l.stack(id)
	if how, _ := l.exporting(); err != nil || id.Kind != blockdev.Volume || how.Open == nil {
		return errdefs.IgnoreNotFound(err)
	}
	exporter, _, err := l.exporter()
	if err != nil {
		return err
	}
	exported, err := l.exportedOf(ctx, exporter, id)
	if err != nil {
		return err
	}
	l.endingAll(id)
	for _, nqn := range exported {
		if err := exporter.Remove(ctx, nqn); err != nil {
			return err
		}
	}
	if len(exported) > 0 { // many may have read one device
		if err := l.detach(ctx, stack); err != nil {
			return errdefs.IgnoreNotFound(err)
		}
	}
	return nil
}

// unexport ends an export by a record. From its beginning on, nothing exports it again.
func (l *Local) unexport(ctx context.Context, pool blockdev.Pool, record blockdev.Record, e export) error {
	l.ending(place{IDOf(pool.Name(), record), pool.Name()}, e.nqn(record.Key)) // what another pool has of it may be exported, by another name
	return l.endExport(ctx, pool, record, e)
}

// endExport is unexport of what KeepExports tries again.
func (l *Local) endExport(ctx context.Context, pool blockdev.Pool, record blockdev.Record, e export) (err error) {
	id := IDOf(pool.Name(), record)
	defer func() {
		if err != nil {
			err = fmt.Errorf("end the export of volume %s to %s: %w", id, e.Grant, err)
		}
	}()
	exporter, how, err := l.exporter()
	switch {
	case err == nil:
		err = exporter.Remove(ctx, e.nqn(id.Key))
	case how.earlier(e.boot): // there is no target, and none that has it
		err = nil
	}
	if err != nil {
		return err
	}
	if err := l.detach(ctx, l.stacks.Of(pool, record.Ref)); err != nil {
		return err
	}
	if err := changeLabel(ctx, pool, record.Ref, labelExport, ""); err != nil {
		return err
	}
	l.ending(place{id, pool.Name()}, e.nqn(id.Key))
	return nil
}

// resized tells the consumer of a volume that grew.
func (l *Local) resized(ctx context.Context, id ID, record blockdev.Record) error {
	e, is, err := exportOf(record)
	if err != nil || !is {
		return err
	}
	exporter, _, err := l.exporter()
	if err != nil {
		return err
	}
	return exporter.Resized(ctx, e.nqn(id.Key))
}

// ReasonNotExported is the reason of the problem of a volume of which the export could not be made, or ended, when the node started. It is tried again, and its
// end has to be told.
const ReasonNotExported = "NotExported"

// exportHealth is what is wrong with the export of a volume that should be there.
func (l *Local) exportHealth(v Volume) []blockdev.Problem {
	err := l.failure(place{v.ID, v.Pool})
	if errors.Is(err, errLater) {
		err = nil
	}
	if how, _ := l.exporting(); err == nil && how.Open == nil && v.Exported.Node != "" {
		err = errors.New(notServing)
	}
	if err == nil {
		return nil
	}
	return []blockdev.Problem{{Severity: blockdev.Inaccessible, Reason: ReasonNotExported,
		Message: fmt.Sprintf("another node uses it, and its home %s cannot export it: %s", l.node, errdefs.Words(err))}}
}

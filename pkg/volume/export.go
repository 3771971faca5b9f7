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

// A volume of this node, its home, may be exported to another node, its consumer (docs/decisions/any-node.md). Exported is the lower part of its stack:
// the pool's device and the top. The consumer alone has the key of an encrypted volume, so the layer of encryption is never exported.
//
// The label labelExport of the record names the consumer. It is set before anything is exported, and stays until all of the export has ended. So at most
// one node can write: an exported volume is attached here only after its export has ended, an attached volume is not exported, and an export to another
// consumer begins after the one before has ended.
//
// As for all of Local, the caller holds the lock of the volume (keylock.Volume), in the table that CSI calls and the agent take their locks from. So does
// who calls for another node.

// Grant names the consumer of an export, for one generation of its claim.
type Grant struct {
	Generation int64
	Node       string
}

func (g Grant) String() string { return fmt.Sprintf("node %s (generation %d)", g.Node, g.Generation) }

// Exported is what a consumer needs to use a volume. It prints without the secrets.
type Exported struct {
	Grant
	NQN    string      // of the subsystem
	Host   string      // NQN that the consumer has to connect with
	Secret secret.Text // of the consumer, for DH-HMAC-CHAP; empty: the target does not authenticate
	PSK    secret.Text // of both sides, for TLS; empty: no TLS
	UUID   string      // of the namespace; its NGUID has the same bytes
	Size   int64       // bytes of the device
	Record blockdev.Record
	// Otherwise: the export was made before TLS was switched on or off on this node, and keeps what it had, as its consumer is connected. It stays so
	// until it ends.
	Otherwise bool
	// Again: the export is no new one. A consumer that is not connected may have been before, and what it wrote then may still be on its way to the disk: so
	// it has the export ended, which waits for that, and asks anew.
	Again bool
}

// GoString is for %#v.
func (e Exported) GoString() string { return e.String() }

// Exporter exports devices to other nodes. nvmet.Target is one, and has the contracts of its methods.
type Exporter interface {
	Authenticates() bool
	// Add exports devices. All that a machine exports when it starts has to be in one call.
	Add(ctx context.Context, exports ...nvmet.Export) error
	// Withdraw ends the connections of an export, if there is one: the consumer's kernel holds what it was not answered, and cannot connect again.
	Withdraw(ctx context.Context, nqn string) error
	// Remove ends an export. It is the fence: after success no I/O of the consumer arrives any more.
	Remove(ctx context.Context, nqn string) error
	Resized(ctx context.Context, nqn string) error
	// Exports returns all exports of the kernel, whoever made them.
	Exports(ctx context.Context) ([]nvmet.Export, error)
}

// Consumers calls the nodes that volumes of this node are exported to. ErrUnavailable if a node does not answer.
type Consumers interface {
	Holder
	// Modified has the consumer set all mutable parameters of a volume (Local.Modified). With an error nothing has changed there.
	Modified(ctx context.Context, id ID, to Grant, mutable map[string]string) error
}

// Holder holds back the writes of consumers.
type Holder interface {
	// Hold has the consumer write out what it has cached of a volume, and hold back its writes until release is called: Local.Hold on that node. If ctx
	// ends first, or this node cannot be reached any more, the consumer resumes its writes by itself. release returns ErrUnavailable if the writes were
	// not held back until then. It is nil if there was nothing to hold back.
	Hold(ctx context.Context, id ID, to Grant) (release func() error, err error)
}

// Exporting is what a node needs to export volumes.
type Exporting struct {
	// Open returns the exporter. It is called when the exporter is first needed, and again after an error. Nil for a node that exports nothing: with Boot
	// it still ends the exports of earlier starts of the machine.
	Open func() (Exporter, error)
	// Given reports whether the kernel exports anything whose name begins with a text, for a node without Open: it may still have what an earlier driver has
	// exported. Nil: that is not known.
	Given func(prefix string) (bool, error)
	// Key is the node's own: 32 random bytes, the same at each start. The consumers' names and secrets are derived from it, so no record has them: lvm2
	// copies records to its tools, archives and support bundles.
	Key []byte
	// TLS: exports go over TLS. Exports that were made without it stay as they are until they end.
	TLS bool
	// Boot identifies this start of the machine. Exports with another one end.
	Boot string
	// Consumers may be nil: then an exported volume cannot be copied, and its parameters cannot be changed.
	Consumers Consumers
	// Locks is the table of the volumes' locks: see keylock.Volume.
	Locks *keylock.Table
}

// place names the record of a volume in one pool. Another pool may have what is left of the same volume after a move, and that may be exported too.
type place struct {
	id   ID
	pool string
}

// exports is the state of the exports of a Local, beside the records.
type exports struct {
	starting sync.Mutex // held while the exports of pools are made again

	mu     sync.Mutex
	how    *Exporting // nil: before ServeExports
	opened Exporter   // nil until it was needed
	failed map[place]error
	given  map[ID]map[string]string // names of exports and their hosts; what this process exported, or found exported for reading, and has not begun to end
}

// notServing is why a node exports nothing.
const notServing = "its driver was started without --remote-address, or cannot use that, as its log says"

// exporting returns how the node exports volumes; false before ServeExports. If Open is nil, the node exports nothing.
func (l *Local) exporting() (how Exporting, is bool) {
	l.exports.mu.Lock()
	defer l.exports.mu.Unlock()
	if l.exports.how == nil {
		return Exporting{}, false
	}
	return *l.exports.how, true
}

// exporter returns the exporter, which it opens at the first call, and how the node exports; the latter with an error too. ErrUnavailable if the node
// exports nothing.
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

// earlier reports whether an export, whose boot is given, was made before this start of the machine. The kernel has forgotten it then. False if the node
// does not know its own boot.
func (how Exporting) earlier(boot string) bool { return how.Boot != "" && boot != how.Boot }

// consumers returns how to call consumers; nil if there is no way to.
func (l *Local) consumers() Consumers {
	how, _ := l.exporting()
	return how.Consumers
}

// setFailed notes that an export that should be there failed, or with nil that it did not. It reports whether it had failed before.
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

// setGiven notes that a volume is exported as nqn to host.
func (l *Local) setGiven(id ID, nqn, host string) {
	l.exports.mu.Lock()
	defer l.exports.mu.Unlock()
	if l.exports.given[id] == nil {
		l.exports.given[id] = map[string]string{}
	}
	l.exports.given[id][nqn] = host
}

// ending notes that exports of a record begin to end, or have ended: KeepExports does not make them again.
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

// endingAll is ending for all exports of a volume, in whichever pool its record is.
func (l *Local) endingAll(id ID) {
	l.exports.mu.Lock()
	defer l.exports.mu.Unlock()
	maps.DeleteFunc(l.exports.failed, func(at place, _ error) bool { return at.id == id })
	delete(l.exports.given, id)
}

// givenOf returns the exports of a volume that this process knows of: the names and their hosts.
func (l *Local) givenOf(id ID) map[string]string {
	l.exports.mu.Lock()
	defer l.exports.mu.Unlock()
	return maps.Clone(l.exports.given[id])
}

// failure returns why an export that should be there is not; nil if it is there, or about to end.
func (l *Local) failure(at place) error {
	l.exports.mu.Lock()
	defer l.exports.mu.Unlock()
	return l.exports.failed[at]
}

// ExportOf returns to whom the record of a volume says that it is exported; false if to nobody.
func (l *Local) ExportOf(ctx context.Context, id ID) (Grant, bool, error) {
	_, record, err := l.finishedRecord(ctx, id)
	if err != nil {
		return Grant{}, false, err
	}
	e, is, err := exportOf(record)
	return e.Grant, is, err
}

// IsExport reports whether the record of a volume says that it is exported under an NQN. Whenever it is exported anew, that is another one.
func (l *Local) IsExport(ctx context.Context, id ID, nqn string) (bool, error) {
	_, record, err := l.finishedRecord(ctx, id)
	if err != nil {
		return false, err
	}
	e, is, err := exportOf(record)
	return is && e.nqn(record.Key) == nqn, err
}

// Gives reports whether the kernel exports a volume to anybody, or is to, as far as this process knows. It does not ask the record: so it can be told while
// the pool does not answer. A node that exports nothing goes by Exporting.Given; ErrUnavailable without that.
func (l *Local) Gives(ctx context.Context, id ID) (bool, error) {
	exporter, how, err := l.exporter()
	if how.Open == nil && how.Given != nil {
		return how.Given(exportsOf(id))
	}
	if err != nil {
		return false, err
	}
	all, err := l.exportedOf(ctx, exporter, id)
	return len(all) > 0, err
}

// Export exports a volume to a consumer. It may be called again, also after it was cut short. An export to another consumer is ended first. Errors:
// ErrPrecondition if that is of a later generation, ErrInUse while the volume is attached here, ErrInvalid for a consumer that cannot have it, and
// ErrUnavailable if this node cannot export now.
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
	again := is && e.Grant == to && e.boot == how.Boot
	if again {
		err = l.unsealUsed(ctx, pool, record) // a consumer that calls Export does not mirror the volume
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
	out, err := l.export(ctx, pool, record, e)
	out.Again = again
	return out, err
}

// recordExport writes the export into the record of a volume. Before that it ends all exports for reading and the seal; ErrInUse if the volume is attached
// here.
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

// mayExport returns ErrInvalid for a consumer that nothing can be exported to: no generation, no valid name, or this node.
func (l *Local) mayExport(id ID, to Grant) error {
	if to.Generation <= 0 || !exportPattern.MatchString(export{to, "0123456789abcdef", "0"}.label()) || to.Node == l.node {
		return fmt.Errorf("%w: volume %s cannot be exported from node %s to %s", errdefs.ErrInvalid, id, l.node, to)
	}
	return nil
}

// unusedHere returns ErrInUse while a volume is attached on this node, also for a pod that outlived its claim. A device for reading that nobody has
// mounted is left out: the driver itself has it, for a moment.
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

// export makes the export that the record of a volume says there is.
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

// attachExport attaches the device to be exported, and returns the export of it. The caller closes the device.
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

// exported returns the export of a device of size bytes, as its consumer gets it.
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

// add exports the device at path. If the exporter has the export already, with TLS instead of without or the reverse, that stays and is returned, with
// Otherwise set. psk is the key that the export has if it is with TLS.
func (e Exported) add(ctx context.Context, exporter Exporter, path string, psk secret.Text) (Exported, error) {
	err := exporter.Add(ctx, e.export(path))
	if !errors.Is(err, nvmet.ErrOtherwise) {
		return e, err
	}
	e.Otherwise = true
	if e.PSK == psk { // it is there without TLS, and complete; to add it again could take an address from exports with TLS
		e.PSK = secret.Text{}
		return e, nil
	}
	e.PSK = psk
	return e, exporter.Add(ctx, e.export(path))
}

// export returns e as the exporter takes it.
func (e Exported) export(path string) nvmet.Export {
	return nvmet.Export{NQN: e.NQN, Host: e.Host, UUID: e.UUID, Device: path, Secret: e.Secret, PSK: e.PSK}
}

// Unexport ends the export of a volume to a generation, or with 0 to any; an export to another generation stays. After success no I/O of the consumer
// arrives any more, and the volume is attached nowhere. After an error it has to be called again: ErrInUse if a process here holds the device that was
// exported.
//
// If the volume has no record, or with 0 a damaged one, all that the kernel exports of it ends; a node that exports nothing has nothing to end. If the
// record can be read but not its export, the kernel's exports decide: they end if all are of the generation, else ErrDataLoss.
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

// noGeneration is a generation that no export has: with it unexportUnread fails if the kernel exports anything of the volume.
const noGeneration = -1

// unexportUnread ends what the kernel exports of a volume whose record does not say to whom; why is the error of exportOf. It returns why if the kernel
// has an export of another generation; 0 stands for all.
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

// exportsOf returns how the names of all exports of a volume begin.
func exportsOf(id ID) string { return nvmet.Prefix + id.Key + ":" }

// exportedOf returns the names of the exports of a volume: those that the kernel has, and those that it should have. Another tool may have removed the
// latter, and left parts.
func (l *Local) exportedOf(ctx context.Context, exporter Exporter, id ID) (nqns []string, err error) {
	all, err := exporter.Exports(ctx)
	for _, e := range all {
		if strings.HasPrefix(e.NQN, exportsOf(id)) {
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

// unexportMissing ends all exports of a volume whose record is gone or cannot be read. Only the kernel and this process know of them.
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
		if err := withdrawAndRemove(ctx, exporter, nqn); err != nil { // it may be mirrored
			return err
		}
	}
	if len(exported) > 0 { // one device may have had several readers
		if err := l.detach(ctx, stack); err != nil {
			return errdefs.IgnoreNotFound(err)
		}
	}
	return nil
}

// unexport ends the export of a record. From its beginning on KeepExports does not make it again, also if it fails.
func (l *Local) unexport(ctx context.Context, pool blockdev.Pool, record blockdev.Record, e export) error {
	l.ending(place{IDOf(pool.Name(), record), pool.Name()}, e.nqn(record.Key)) // of this name alone: another pool may have an export of the same volume
	return l.endExport(ctx, pool, record, e)
}

// endExport ends the export of a record. Unlike after unexport, KeepExports tries again what has failed.
func (l *Local) endExport(ctx context.Context, pool blockdev.Pool, record blockdev.Record, e export) (err error) {
	id := IDOf(pool.Name(), record)
	defer func() {
		if err != nil {
			err = fmt.Errorf("end the export of volume %s to %s: %w", id, e.Grant, err)
		}
	}()
	exporter, how, err := l.exporter()
	switch {
	case err == nil && mayBeMirrored(record):
		err = l.endMirrored(ctx, pool, record, exporter, e.nqn(id.Key))
	case err == nil:
		err = exporter.Remove(ctx, e.nqn(id.Key))
	case how.earlier(e.boot): // the kernel has forgotten the export, so no target is needed
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

// mayBeMirrored reports whether the consumer of a volume may have a mirror over it and others: it is a leg, or moves, or has moved, while it is used.
func mayBeMirrored(r blockdev.Record) bool {
	return r.Labels[labelReplicaOf] != "" || r.Labels[labelTold] != "" || r.Labels[labelImport] != ""
}

// withdrawAndRemove ends the export of what may be mirrored while its consumer may be at work: its kernel holds what it was not answered, and has no
// errors before its driver ends the mirror. If the namespace went first, a flush could fail before any write does. The mirror of the consumer forgets that, and
// acknowledges what is on the other legs alone (docs/decisions/replicas.md).
func withdrawAndRemove(ctx context.Context, exporter Exporter, nqn string) error {
	if err := exporter.Withdraw(ctx, nqn); err != nil {
		return err
	}
	return exporter.Remove(ctx, nqn)
}

// endMirrored ends the export of what may be mirrored, and flushes it: with multipath the consumer's kernel takes a flush that was under way for one that was carried out.
// A leg that could not be flushed is not used next, if there is another one.
func (l *Local) endMirrored(ctx context.Context, pool blockdev.Pool, record blockdev.Record, exporter Exporter, nqn string) error {
	if err := withdrawAndRemove(ctx, exporter, nqn); err != nil {
		return err
	}
	if err := l.stacks.Of(pool, record.Ref).Flush(ctx); err != nil {
		err = errors.Join(err, noteLoss(context.WithoutCancel(ctx), pool, record.Ref)) // at once: the disk tells only once
		klog.FromContext(ctx).Error(err, "Could not flush a volume whose export has ended; it may lack what its consumer has written last", "volume", record.Ref.String())
	}
	return nil
}

// resized tells the consumer of a volume, if there is one, that it has grown.
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

// ReasonNotExported is the reason of the problem of a volume whose export could not be made again, or ended, when the node started. It is tried again.
// When it succeeds, the end of the problem has to be reported.
const ReasonNotExported = "NotExported"

// exportHealth returns the problem of a volume whose export should be there and is not. There is none while only the volume's lock is waited for
// (errLater).
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

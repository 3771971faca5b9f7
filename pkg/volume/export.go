package volume

import (
	"context"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

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

// export is what the record of a volume says of its export.
//
// It ends with the start of the machine in which it was made. A disk that loses its power loses what it had acknowledged and not flushed, and whoever
// uses it is to know. A consumer does not: its kernel would connect again, flush, and be told that all is safe. Without the export its I/O ends
// with errors, as that of a disk that is gone.
type export struct {
	Grant
	word string // random; the export's own
	boot string // the word of the machine's start (Exporting.Boot)
}

var exportPattern = regexp.MustCompile(`^([1-9][0-9]{0,18}):([0-9a-f]{16}):([0-9a-f-]{1,36}):(\S+)$`)

func (e export) label() string {
	return fmt.Sprintf("%d:%s:%s:%s", e.Generation, e.word, e.boot, e.Node)
}

// exportOf is the export of an object, if its record has one. ErrDataLoss for one that cannot be read.
func exportOf(r blockdev.Record) (e export, is bool, err error) {
	label := r.Labels[labelExport]
	if label == "" {
		return export{}, false, nil
	}
	parts := exportPattern.FindStringSubmatch(label)
	if parts != nil {
		e.word, e.boot, e.Node = parts[2], parts[3], parts[4]
		e.Generation, err = strconv.ParseInt(parts[1], 10, 64)
	}
	if parts == nil || err != nil {
		return export{}, true, fmt.Errorf("%w: the record of %s says that it is exported, and not to whom; another version of the driver may have written it: "+
			"end the pods that use the volume, which ends what is exported of it", errdefs.ErrDataLoss, r.Ref)
	}
	return e, true, nil
}

// IsExported reports whether the record of a volume says that another node uses it.
func IsExported(r blockdev.Record) bool { return r.Labels[labelExport] != "" }

func newExport(to Grant, boot string) export {
	word := make([]byte, 8)
	_, _ = rand.Read(word) // it never fails
	return export{to, hex.EncodeToString(word), boot}
}

// nqn is the name of the subsystem: no other export has it, of whatever volume and whatever generation.
func (e export) nqn(key string) string {
	return fmt.Sprintf("%s%s:%d:%s", nvmet.Prefix, key, e.Generation, e.word)
}

// derived are 32 bytes for a purpose, which only who has the node's key can know.
func derived(node []byte, nqn, purpose string) []byte {
	mac := hmac.New(sha256.New, node)
	mac.Write([]byte(purpose + "\x00" + nqn))
	return mac.Sum(nil)
}

// hostProof is the word in the name of the host of an export.
func hostProof(node []byte, nqn string) string {
	return fmt.Sprintf("%x", derived(node, nqn, "host")[:8])
}

// host is the name of the one host that may connect.
func (e export) host(node []byte, volume string) string {
	consumer := sha256.Sum256([]byte(e.Node))
	return fmt.Sprintf("%snode:%x:%s", nvmet.Prefix, consumer[:8], hostProof(node, e.nqn(volume)))
}

// secret is what the host proves that it has.
func (e export) secret(node []byte, volume string) secret.Text {
	return nvmet.Secret(derived(node, e.nqn(volume), "secret"))
}

// psk is what all that goes to the host and comes from it is encrypted by, for both of them.
func (e export) psk(node []byte, volume string) secret.Text {
	return nvmet.PSK(derived(node, e.nqn(volume), "psk"))
}

// uuid is that of the namespace: the kernel refuses two of one UUID in different subsystems, and one of an earlier generation may be there still.
func (e export) uuid(key string) string {
	sum := sha256.Sum256([]byte(e.nqn(key)))
	sum[6], sum[8] = sum[6]&0x0f|0x80, sum[8]&0x3f|0x80 // RFC 9562, version 8
	return fmt.Sprintf("%x-%x-%x-%x-%x", sum[:4], sum[4:6], sum[6:8], sum[8:10], sum[10:16])
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

// taken are the names of what the exporter does not have any more, or not whole, though nobody here has begun to end it: other tools for the kernel's target clear all of it.
func (l *Local) taken(ctx context.Context) map[ID][]string {
	l.exports.mu.Lock()
	given := map[ID]map[string]string{}
	for id, nqns := range l.exports.given {
		given[id] = maps.Clone(nqns)
	}
	l.exports.mu.Unlock()
	if len(given) == 0 {
		return nil
	}
	exporter, _, err := l.exporter()
	var have []nvmet.Export
	if err == nil {
		have, err = exporter.Exports(ctx)
	}
	if err != nil {
		klog.FromContext(ctx).Error(err, "Could not find out whether all volumes that other nodes use are exported")
		return nil
	}
	whole := map[string]bool{}
	for _, e := range have {
		whole[e.NQN] = e.Device != "" && e.Host != ""
	}
	taken := map[ID][]string{}
	for id, nqns := range given {
		for nqn := range nqns {
			if !whole[nqn] {
				taken[id] = append(taken[id], nqn)
			}
		}
	}
	return taken
}

// ServeExports has the node export volumes, and exports again what its records tell of; of pools that come later, when they come. It is to be
// called before anybody is answered. What cannot be exported now, KeepExports tries again, and health says so. What was exported before the machine started ends.
func (l *Local) ServeExports(ctx context.Context, how Exporting) {
	l.exports.mu.Lock()
	l.exports.how = &how
	l.exports.mu.Unlock()
	l.arriving.Lock() // recover looks after it has put a pool there
	arrived := make([]blockdev.Pool, 0, len(l.arrived))
	for _, pool := range l.arrived {
		arrived = append(arrived, pool)
	}
	l.arriving.Unlock()
	if err := l.exportAgain(ctx, arrived...); err != nil {
		klog.FromContext(ctx).Error(err, "Could not look for volumes to export again")
	}
}

// again is an export that is made again.
type again struct {
	Exported
	place
	device blockdev.Device
}

// lot are exports that are made again, all at once: see nvmet.Target.Add. It has the locks of their volumes until it is done.
type lot struct {
	all     []again
	unlocks map[string]func() // by the volumes' keys
}

// lock takes the lock of a volume, unless somebody else has it.
func (m *lot) lock(how Exporting, id ID) bool {
	if m.unlocks[id.Key] != nil {
		return true
	}
	unlock, _ := how.Locks.TryLock([]string{keylock.Volume(id.Key)}, nil)
	if unlock == nil {
		return false
	}
	if m.unlocks == nil {
		m.unlocks = map[string]func(){}
	}
	m.unlocks[id.Key] = unlock
	return true
}

func (m *lot) done() {
	for _, unlock := range m.unlocks {
		unlock()
	}
}

// errLater is why a volume is not exported again that somebody works on: by the record that is read meanwhile, what is about to end would be.
var errLater = fmt.Errorf("%w: something else is done to it", errdefs.ErrBusy)

// exportAgain exports what the records of pools say. The pools come with a start, or have gone and come back: there, calls for their volumes may be on their way. What cannot
// be exported, or is being worked on, KeepExports tries again; the former is logged.
func (l *Local) exportAgain(ctx context.Context, pools ...blockdev.Pool) (err error) {
	how, is := l.exporting()
	if !is {
		return nil
	}
	l.exports.starting.Lock()
	defer l.exports.starting.Unlock()
	var m lot
	defer m.done()
	for _, pool := range pools {
		err = errors.Join(err, l.attachAgain(ctx, &m, how, pool))
	}
	return errors.Join(err, l.addAgain(ctx, m.all))
}

// attachAgain attaches what the records of a pool say is exported, and ends what was exported before the machine started.
func (l *Local) attachAgain(ctx context.Context, m *lot, how Exporting, pool blockdev.Pool) error {
	records, err := pool.List(ctx, blockdev.Volume, "", 0)
	if err != nil {
		return err
	}
	for _, record := range records {
		if !IsExported(record) && record.Labels[labelRead] == "" {
			continue
		}
		at := place{IDOf(pool.Name(), record), pool.Name()}
		if !m.lock(how, at.id) {
			l.setFailed(at, errLater)
			continue
		}
		record, err := pool.Get(ctx, record.Ref) // as it is now
		if err == nil {
			err = l.recordAgain(ctx, m, how, pool, record)
		}
		if err != nil {
			l.failedAgain(ctx, at, err)
		}
	}
	return nil
}

// recordAgain attaches what a record says is exported by one name. Of what many read the record does not say to whom: what the kernel has of it is noted.
func (l *Local) recordAgain(ctx context.Context, m *lot, how Exporting, pool blockdev.Pool, record blockdev.Record) error {
	e, is, err := exportOf(record)
	if err != nil {
		return err
	}
	if !is {
		return l.noteReaders(ctx, pool, record)
	}
	one := again{place: place{IDOf(pool.Name(), record), pool.Name()}}
	if one.Exported, one.device, err = l.attachOrEnd(ctx, how, pool, record, e); one.NQN != "" {
		m.all = append(m.all, one)
	}
	return err
}

// attachOrEnd is attachExport of an export that goes on. One of before the machine started ends: nothing is returned then, and nothing on a node that exports nothing.
func (l *Local) attachOrEnd(ctx context.Context, how Exporting, pool blockdev.Pool, record blockdev.Record, e export) (Exported, blockdev.Device, error) {
	if !how.earlier(e.boot) {
		if how.Open == nil { // health says so
			return Exported{}, blockdev.Device{}, nil
		}
		return l.attachExport(ctx, pool, record, e)
	}
	klog.FromContext(ctx).Info("This machine has started anew, and may have lost what was written and not flushed; so who used a volume from elsewhere gets errors, and has to stage it again",
		"pool", pool.Name(), "volume", record.Ref.String(), "consumer", e.Node)
	return Exported{}, blockdev.Device{}, l.endExport(ctx, pool, record, e)
}

// addAgain exports what is attached, in one call, and closes the devices. What is exported already the other way, with TLS or without, goes on.
func (l *Local) addAgain(ctx context.Context, all []again) (err error) {
	if len(all) == 0 {
		return nil
	}
	defer func() {
		for i := range all {
			err = errors.Join(err, all[i].device.Close())
		}
	}()
	exporter, _, err := l.exporter()
	if err != nil { // it was there a moment ago
		return err
	}
	add := make([]nvmet.Export, len(all))
	for i, one := range all {
		add[i] = one.export(one.device.Path)
	}
	together, failures := exporter.Add(ctx, add...), map[place]error{}
	for i, one := range all {
		var failure error
		if together != nil { // of some of them
			failure = exporter.Add(ctx, add[i])
		}
		if errors.Is(failure, nvmet.ErrOtherwise) {
			failure = nil
		}
		if failure == nil {
			l.setGiven(one.id, one.NQN, one.Host)
		}
		failures[one.place] = errors.Join(failures[one.place], failure)
	}
	for at, failure := range failures {
		l.failedAgain(ctx, at, failure)
	}
	return nil
}

// failedAgain notes how it stands with an export that is made again.
func (l *Local) failedAgain(ctx context.Context, at place, err error) {
	switch before := l.setFailed(at, err); {
	case err != nil && !before:
		klog.FromContext(ctx).Error(err, "Could not export a volume again; it is tried again", "volume", at.id.String(), "pool", at.pool)
	case err == nil && before:
		klog.FromContext(ctx).Info("Exported a volume again", "volume", at.id.String(), "pool", at.pool)
	}
}

// exportPause is after how long an export that failed is tried again.
const exportPause = 10 * time.Second

// KeepExports exports, until ctx ends, what could not be when the node started, and what somebody else has taken out of the kernel since; and ends what is exported and in
// no record.
func (l *Local) KeepExports(ctx context.Context) {
	ticks := time.NewTicker(exportPause)
	defer ticks.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticks.C:
			l.retryExports(ctx)
			if err := l.endUnsaid(ctx); err != nil && ctx.Err() == nil {
				klog.FromContext(ctx).V(2).Info("Could not end what is exported and in no record; trying again", "err", err.Error())
			}
		}
	}
}

// retryExports tries all of them in one call, too: perhaps none could be exported.
func (l *Local) retryExports(ctx context.Context) {
	taken := map[place][]string{}
	for id, nqns := range l.taken(ctx) {
		taken[place{id, l.placeOf(id)}] = nqns
	}
	l.exports.mu.Lock()
	for at := range l.exports.failed {
		if _, is := taken[at]; !is {
			taken[at] = nil
		}
	}
	l.exports.mu.Unlock()
	how, _ := l.exporting()
	var m lot
	defer m.done()
	for at, nqns := range taken {
		if !m.lock(how, at.id) {
			continue // until the next time
		}
		if err := l.retryExport(ctx, &m, how, at, nqns); err != nil {
			l.failedAgain(ctx, at, err)
		}
	}
	if err := l.addAgain(ctx, m.all); err != nil {
		klog.FromContext(ctx).Error(err, "Could not export volumes again; they are tried again")
	}
}

// retryExport attaches what is to be exported again by a record, the lock of whose volume the caller has: what failed, or was taken by some names; unless its end has begun meanwhile.
func (l *Local) retryExport(ctx context.Context, m *lot, how Exporting, at place, taken []string) error {
	given := l.givenOf(at.id)
	maps.DeleteFunc(given, func(nqn, _ string) bool { return !slices.Contains(taken, nqn) })
	if len(given) == 0 && l.failure(at) == nil {
		return nil
	}
	names := slices.Sorted(maps.Keys(given))
	if len(given) > 0 {
		klog.FromContext(ctx).Info("The kernel does not export a volume any more that other nodes use, and this driver has not ended that; exporting it again", "volume", at.id.String(),
			"exports", names)
	}
	pool, record, err := l.recordAt(ctx, at)
	switch {
	case errors.Is(err, errdefs.ErrNotFound), err == nil && !IsExported(record) && record.Labels[labelRead] == "":
		l.ending(at, names...)
		return nil
	case err != nil:
		return nil // until its pool answers
	case len(given) > 0 && !IsExported(record):
		return l.readAgain(ctx, m, pool, record, given)
	}
	return l.recordAgain(ctx, m, how, pool, record)
}

// recordAt returns the record of a volume that a pool has, be it the volume's own or of what is left of it.
func (l *Local) recordAt(ctx context.Context, at place) (blockdev.Pool, blockdev.Record, error) {
	pool, err := l.pool(at.pool)
	if err != nil {
		return nil, blockdev.Record{}, err
	}
	record, err := pool.Get(ctx, at.id.ref())
	return pool, record, err
}

// anyRecord returns the record of a volume, whole as the pool has it, also of an unfinished one.
func (l *Local) anyRecord(ctx context.Context, id ID) (blockdev.Pool, blockdev.Record, error) {
	pool, ref, err := l.object(id, blockdev.Volume)
	if err != nil {
		return nil, blockdev.Record{}, err
	}
	record, err := pool.Get(ctx, ref)
	return pool, record, err
}

// exportRecord returns the record of a volume, whole as the pool has it.
func (l *Local) exportRecord(ctx context.Context, id ID) (blockdev.Pool, blockdev.Record, error) {
	pool, record, err := l.anyRecord(ctx, id)
	if err == nil && unfinished(record) {
		err = fmt.Errorf("%w: volume %s is being copied", errdefs.ErrNotFound, id)
	}
	return pool, record, err
}

// ExportOf says to whom a volume is exported, by its record; false if to nobody.
func (l *Local) ExportOf(ctx context.Context, id ID) (Grant, bool, error) {
	_, record, err := l.exportRecord(ctx, id)
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
	pool, record, err := l.exportRecord(ctx, id)
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
		if err != nil {
			return Exported{}, err
		}
	} else {
		if is {
			err = l.unexport(ctx, pool, record, e)
		}
		if err == nil {
			err = l.endAllReading(ctx, id)
		}
		if err == nil {
			err = l.unusedHere(ctx, pool, record.Ref)
		}
		if err == nil {
			err = l.unseal(ctx, pool, record)
		}
		if err != nil {
			return Exported{}, err
		}
		e = newExport(to, how.Boot)
		if record, err = pool.SetLabels(ctx, record.Ref, func(labels map[string]string) error {
			setLabel(labels, labelExport, e.label())
			return nil
		}); err != nil {
			return Exported{}, err
		}
	}
	return l.export(ctx, pool, record, e)
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

// keySize is that of Exporting.Key, in bytes.
const keySize = 32

// ExportKey returns the key in a file that nobody else reads, for Exporting. If there is no file it makes one, durably: another key would be of no use to
// consumers that are connected.
func ExportKey(path string) ([]byte, error) {
	key, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		key = make([]byte, keySize)
		_, _ = rand.Read(key) // it never fails
		err = writeKey(path, key)
	}
	if err == nil && len(key) != keySize {
		err = fmt.Errorf("%w: it has %d bytes, not %d; remove it, and a new one is made: what other nodes use of this one has to be staged again then", errdefs.ErrDataLoss, len(key), keySize)
	}
	if err != nil {
		return nil, fmt.Errorf("key for exports %s: %w", path, err)
	}
	return key, nil
}

// writeKey makes a file of all of a key, or none.
func writeKey(path string, key []byte) (err error) {
	temporary := path + ".new"
	f, err := os.OpenFile(temporary, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(key)
	if err = errors.Join(err, f.Sync(), f.Close()); err != nil {
		return err
	}
	if err := os.Rename(temporary, path); err != nil {
		return err
	}
	directory, err := os.Open(filepath.Dir(path))
	if err != nil {
		return err
	}
	return errors.Join(directory.Sync(), directory.Close())
}

package volume

import (
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"regexp"
	"strconv"

	"github.com/ashlar-csi/ashlar/internal/secret"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/nvmet"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// What the record of a volume says of its export, and what follows from that: the names, and the secrets, by which a consumer knows it.

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

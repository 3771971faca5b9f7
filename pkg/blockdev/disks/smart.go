package disks

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/ashlar-csi/ashlar/internal/command"
)

// Report is what a disk says of itself.
type Report struct {
	Model, Serial string
	// Told: it says how it is. Virtual disks do not, nor those behind many USB bridges and RAID controllers, nor one that sleeps.
	Told bool
	// Failing is why it fails or is about to, by its own word: the overall assessment of SMART, attributes at their thresholds, NVMe's critical warnings.
	Failing []string
	// Heat: it says that it is too hot or too cold. The cause is around it, and no sign that it fails.
	Heat bool
	// Wear is the part of its life as flash that is used, as its maker counts: 1 is all of it, and more is possible; -1 if it does not say.
	Wear float64
	// Errors are counts of what went wrong on its medium, by kind.
	Errors map[string]int64
}

// The kinds of errors. Pending sectors cannot be read now, and go when they are written to; the others only become more.
const (
	Pending       = "pending"       // sectors that cannot be read (ATA attributes 197 and 198)
	Reallocated   = "reallocated"   // sectors that were replaced (ATA attribute 5, SCSI's grown defects)
	Uncorrectable = "uncorrectable" // errors that were reported to the machine (ATA attribute 187, SCSI's error counters, NVMe's media errors)
)

// worn is the Wear from which on a disk is reported.
const worn = 0.9

// askTime bounds a question to a disk. One that spins up takes 30 s at most (ATA; smartctl waits for nothing else).
const askTime = time.Minute

// ask returns the report of a disk, by smartctl(8). It does not wake one that sleeps.
func ask(ctx context.Context, smartctl, disk string) (Report, error) {
	ctx, cancel := context.WithTimeout(ctx, askTime)
	defer cancel()
	out, _, err := command.Run(ctx, smartctl, "--json", "--nocheck=standby,0", "--info", "--health", "--attributes", "--log=ssd", "/dev/"+disk)
	var failure *command.Error
	if errors.As(err, &failure) && failure.Code > 0 {
		err = nil // the code is bits, most of which are about the disk (smartctl(8), RETURN VALUES)
	}
	if err != nil {
		return Report{}, fmt.Errorf("ask disk %s how it is: %w", disk, err)
	}
	return parse([]byte(out))
}

// missing reports whether an error means that smartctl is not installed.
func missing(err error) bool {
	return errors.Is(err, exec.ErrNotFound) || errors.Is(err, fs.ErrNotExist)
}

// answer is the part of smartctl's JSON that is used, of its versions 7.0 and later.
type answer struct {
	Model     string `json:"model_name"`
	SCSIModel string `json:"scsi_model_name"`
	Serial    string `json:"serial_number"`
	Status    struct {
		Passed *bool `json:"passed"`
	} `json:"smart_status"`
	ATA struct {
		Table []attribute `json:"table"`
	} `json:"ata_smart_attributes"`
	Statistics struct {
		Pages []struct {
			Table []struct {
				Name  string `json:"name"`
				Value int64  `json:"value"`
				Flags struct {
					Valid bool `json:"valid"`
				} `json:"flags"`
			} `json:"table"`
		} `json:"pages"`
	} `json:"ata_device_statistics"`
	Endurance *struct {
		Percent int64 `json:"current_percent"`
	} `json:"endurance_used"` // since smartctl 7.5, of all kinds
	NVMe *struct {
		Warning   int64  `json:"critical_warning"`
		Used      *int64 `json:"percentage_used"`
		Spare     *int64 `json:"available_spare"`
		Threshold int64  `json:"available_spare_threshold"`
		Errors    int64  `json:"media_errors"`
	} `json:"nvme_smart_health_information_log"`
	Grown    *int64 `json:"scsi_grown_defect_list"`
	SCSIUsed *int64 `json:"scsi_percentage_used_endurance_indicator"`
	Counters map[string]struct {
		Uncorrected int64 `json:"total_uncorrected_errors"`
	} `json:"scsi_error_counter_log"`
}

// attribute is an attribute of ATA.
type attribute struct {
	ID         int    `json:"id"`
	Name       string `json:"name"`
	WhenFailed string `json:"when_failed"` // now, past, or empty
	Flags      struct {
		Prefailure bool `json:"prefailure"`
	} `json:"flags"`
	Raw struct {
		Text string `json:"string"`
	} `json:"raw"`
}

// count returns the number at the beginning of the raw value: some makers put others behind it ("8 (0 4)").
func (a attribute) count() int64 {
	digits := a.Raw.Text[:len(a.Raw.Text)-len(strings.TrimLeft(a.Raw.Text, "0123456789"))]
	n, err := strconv.ParseInt(digits, 10, 64)
	if err != nil {
		return 0
	}
	return n
}

// kinds are the attributes of ATA that count errors.
var kinds = map[int]string{5: Reallocated, 187: Uncorrectable, 197: Pending, 198: Pending}

// warnings are the bits of NVMe's critical warning (NVM Express Base Specification, SMART / Health Information).
var warnings = []string{"it runs out of spare blocks", heat, "it is not reliable any more", "it takes no writes any more",
	"its memory backup has failed", "its persistent memory is read-only"}

const heat = "it is too hot or too cold"

// parse reads smartctl's answer. If a field has a value that does not fit its type (a counter of 128 bits, of a disk gone mad), it uses the others: a disk
// that fails may count wrong.
func parse(text []byte) (Report, error) {
	var a answer
	var odd *json.UnmarshalTypeError
	if err := json.Unmarshal(text, &a); err != nil && (!errors.As(err, &odd) || odd.Field == "") {
		return Report{}, fmt.Errorf("what smartctl says is no JSON: %w", err)
	}
	r := Report{Model: a.Model, Serial: a.Serial, Wear: -1, Errors: map[string]int64{}}
	if r.Model == "" {
		r.Model = a.SCSIModel
	}
	r.Told = a.Status.Passed != nil || a.NVMe != nil || len(a.ATA.Table) > 0
	a.ata(&r)
	a.nvme(&r)
	a.scsi(&r)
	if a.Endurance != nil {
		r.Wear = float64(a.Endurance.Percent) / 100
	}
	if a.Status.Passed != nil && !*a.Status.Passed && len(r.Failing) == 0 && !r.Heat { // for NVMe smartctl says that of any warning
		r.Failing = []string{"its overall assessment is FAILED"}
	}
	return r, nil
}

func (a *answer) ata(r *Report) {
	for _, one := range a.ATA.Table {
		if kind := kinds[one.ID]; kind != "" {
			r.Errors[kind] = max(r.Errors[kind], one.count()) // 197 and 198 may be the same sectors
		}
		if one.WhenFailed == "now" && one.Flags.Prefailure {
			r.Failing = append(r.Failing, fmt.Sprintf("attribute %d (%s) is at its threshold", one.ID, one.Name))
		}
	}
	for _, page := range a.Statistics.Pages {
		for _, one := range page.Table {
			if one.Name == "Percentage Used Endurance Indicator" && one.Flags.Valid {
				r.Wear = float64(one.Value) / 100
			}
		}
	}
}

func (a *answer) nvme(r *Report) {
	n := a.NVMe
	if n == nil {
		return
	}
	for bit, means := range warnings {
		switch {
		case n.Warning&(1<<bit) == 0:
		case means == heat:
			r.Heat = true
		default:
			r.Failing = append(r.Failing, means)
		}
	}
	r.Errors[Uncorrectable] = n.Errors
	if n.Used != nil {
		r.Wear = float64(*n.Used) / 100
	}
	if n.Spare != nil && n.Threshold > 0 && *n.Spare <= n.Threshold {
		r.Wear = max(r.Wear, 1)
	}
}

func (a *answer) scsi(r *Report) {
	if a.Grown != nil {
		r.Errors[Reallocated] = *a.Grown
	}
	for _, one := range a.Counters {
		r.Errors[Uncorrectable] += one.Uncorrected
	}
	if a.SCSIUsed != nil {
		r.Wear = float64(*a.SCSIUsed) / 100
	}
}

// described returns the name of a disk with its model and serial number, for people.
func (r Report) described(name string) string {
	words := slices.DeleteFunc([]string{r.Model, r.Serial}, func(s string) bool { return s == "" })
	if len(words) == 0 {
		return name
	}
	return fmt.Sprintf("%s (%s)", name, strings.Join(words, ", "))
}
